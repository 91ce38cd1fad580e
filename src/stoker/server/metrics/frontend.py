"""The metrics of base/metrics.py in Prometheus' format: counters of the frontends, and the executor's statistics at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest, multiprocess
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily

from stoker.base import env, metrics
from stoker.base.metrics import EXECUTOR_METRICS, FRONTEND_METRICS, Metric
from stoker.frontend.repository import ModelRepository
from stoker.runtime.request import ExecutorStats
from stoker.server.metrics.counters import BufferedCounter, BufferedHistogram, CounterBuffer
from stoker.server.metrics.shared_files import use_files
from stoker.server.metrics.statistics import ExecutorStatistics, KnownStatistics
from stoker.server.metrics.triton import TritonMetrics, triton_names
from stoker.server.metrics.triton_gauges import executor_families

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"  # prometheus-client reads it on import; set if there are several frontends


class FrontendMetrics:
    """The counters of this process. Several frontends write theirs to files, and each frontend reports the sums.

    A frontend with an `index` continues the files of an ended one with that index. Raises ConfigError if there is no space for the files.
    """

    def __init__(self, index: int | None = None) -> None:
        if folder := env.text(MULTIPROCESS_DIR):
            use_files(Path(folder), index)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise each counter gets a gauge with its creation time
        self.registry = CollectorRegistry()
        self._metrics = {metric.name: self._create(metric) for metric in FRONTEND_METRICS}
        self._children: dict[tuple[str, tuple[str, ...]], BufferedCounter | BufferedHistogram] = {}
        self.counter_buffer = CounterBuffer(shared=bool(env.text(MULTIPROCESS_DIR)))
        self.triton = TritonMetrics(self.registry, self.counter_buffer)
        self.statistics = ExecutorStatistics()
        self.num_restarts: Mapping[str, int] = {}  # by the name of the process; from the supervisor

    def of(self, metric: Metric, *labels: str) -> Any:
        """The buffered counter or histogram of a metric with these label values."""
        if (child := self._children.get((metric.name, labels))) is None:
            unbuffered = self._metrics[metric.name].labels(*labels)
            buffered = self.counter_buffer.histogram if metric.kind == "histogram" else self.counter_buffer.counter
            child = self._children[metric.name, labels] = buffered(unbuffered)
        return child

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP response. `route` is the path with names in place of its parameters."""
        self.of(metrics.RESPONSES, route, str(status)).inc()

    def histogram(self, metric: Metric, model: str) -> list[int]:
        """The number of observations in each bucket of a histogram of `model`, over all frontends. The last bucket has no upper bound."""
        self.counter_buffer.write()
        families: Iterable[MetricFamily]
        if env.text(MULTIPROCESS_DIR):
            families = multiprocess.MultiProcessCollector(CollectorRegistry()).collect()  # type: ignore[no-untyped-call]
        else:
            families = self._metrics[metric.name].collect()
        samples = [sample for family in families for sample in family.samples if sample.name == f"{metric.name}_bucket"]
        bounds = sorted((float(each.labels["le"]), int(each.value)) for each in samples if each.labels["model"] == model)
        return [count - before for (_, count), before in zip(bounds, [0, *(count for _, count in bounds)], strict=False)]

    async def exposition(self, repository: ModelRepository) -> bytes:
        """All metrics in Prometheus' text format. An executor that does not answer has its last statistics, and their age."""
        self.counter_buffer.write()
        scrape = CollectorRegistry()
        scrape.register(_Executors(await self.statistics.read(repository)))
        scrape.register(_Restarts(self.num_restarts))
        return await asyncio.to_thread(lambda: triton_names(self._frontend_metrics()) + generate_latest(scrape))

    def _frontend_metrics(self) -> bytes:
        """The counters in Prometheus' text format: the sums over all frontends if there are several."""
        if not env.text(MULTIPROCESS_DIR):
            return generate_latest(self.registry)
        combined = CollectorRegistry()
        multiprocess.MultiProcessCollector(combined)  # type: ignore[no-untyped-call]
        return generate_latest(combined)

    def _create(self, metric: Metric) -> Counter | Histogram:
        """prometheus-client's counter or histogram for one of base/metrics.py."""
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)


class _Executors:
    """A Prometheus collector for the executors' statistics of one scrape, by model."""

    def __init__(self, known: dict[str, KnownStatistics]) -> None:
        self._known = known

    def collect(self) -> Iterable[MetricFamily]:
        """One family of samples per executor metric, with a sample for each model."""
        for metric in EXECUTOR_METRICS:
            family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=metric.labels
            )
            for model, known in self._known.items():
                labels = {"model": model, "proposer": known.stats.proposer}
                family.add_metric([labels[name] for name in metric.labels], value_of(known.stats, metric.source))
            yield family
        yield from executor_families({model: known.stats for model, known in self._known.items()})
        age = GaugeMetricFamily(metrics.STATISTICS_AGE.name, metrics.STATISTICS_AGE.help, labels=metrics.STATISTICS_AGE.labels)
        for model, known in self._known.items():
            age.add_metric([model], known.age_s)
        yield age


class _Restarts:
    """A Prometheus collector for the number of restarts by the name of the process."""

    def __init__(self, num_restarts: Mapping[str, int]) -> None:
        self._num_restarts = num_restarts

    def collect(self) -> Iterable[MetricFamily]:
        """One family, with a sample for each process name."""
        metric = metrics.PROCESS_RESTARTS
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for process, number in self._num_restarts.items():
            family.add_metric([process], number)
        yield family


def value_of(stats: ExecutorStats, source: str) -> float:
    """The value that a metric's `source` names: a field of the statistics, or a value derived from them."""
    match source:
        case "num_used_blocks":
            return stats.num_blocks - stats.num_free_blocks
        case "occupancy":
            possible = stats.num_steps * stats.max_batch_size
            return stats.row_steps / possible if possible else 0.0
    value: float = getattr(stats, source)
    return value
