"""Reads the executor's metrics from a server's /metrics."""

from __future__ import annotations

from stoker.base.metrics import EXECUTOR_METRICS
from stoker.cli.clients.http import get


async def read_metrics(url: str) -> dict[str, float]:
    """Executor metrics by name, summed over models: fields of ExecutorStats (num_steps, ...) and derived values (num_used_blocks, ...).

    Raises the same errors as `http.get`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    names = {metric.name: metric.source for metric in EXECUTOR_METRICS}
    values: dict[str, float] = {}
    for family in text_string_to_metric_families((await get(url, "/metrics")).decode()):
        for sample in family.samples:
            if (name := names.get(sample.name)) is not None:
                values[name] = values.get(name, 0.0) + sample.value
    return values
