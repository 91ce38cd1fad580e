"""A running server's numbers, from its /metrics."""

from __future__ import annotations

from stoker.base.metrics import EXECUTOR_METRICS
from stoker.cli.http import get


async def scrape(url: str) -> dict[str, float]:
    """Executor metrics by ExecutorStats field (num_steps, row_steps, ...) or derived name (num_used_blocks, occupancy).

    Of several models, the sum. Raises as `http.get` does.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sources = {metric.name: metric.source for metric in EXECUTOR_METRICS}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await get(url, "/metrics")).decode()):
        for sample in family.samples:
            if (source := sources.get(sample.name)) is not None:
                found[source] = found.get(source, 0.0) + sample.value
    return found
