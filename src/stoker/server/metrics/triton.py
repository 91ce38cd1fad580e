"""Metrics under the names of Triton and TensorRT-LLM. The same counters are the source of each model's KServe statistics.

prometheus-client appends `_total` to a counter's name and Triton does not, so `triton_names` removes it.
"""

from __future__ import annotations

import re
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from stoker.base.metrics import TRITON_FAILED_DURATION
from stoker.server.metrics.counters import CounterBuffer
from stoker.server.metrics.triton_gauges import LABELS, VERSION

FAILURES = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0, 10000.0)

_COUNTERS = {
    "nv_inference_request_success": "Number of successful inference requests, all batch sizes",
    "nv_inference_count": "Number of inferences performed (does not include cached requests)",
    "nv_inference_request_duration_us": "Cumulative inference request duration in microseconds (includes cached requests)",
}
# Families with the same values as another family: a request is executed once, and only its inference takes time. Copying them at the
# scrape saves 20 µs per request.
_COPIES = {
    "nv_inference_exec_count": (
        "nv_inference_request_success",
        "Number of model executions performed (does not include cached requests)",
    ),
    "nv_inference_compute_infer_duration_us": (
        "nv_inference_request_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
    ),
}
# Durations that are always 0. Requests wait in the executor's queue, whose metrics are named stoker_*.
_ZEROS = {
    "nv_inference_queue_duration_us": "Cumulative inference queuing duration in microseconds (includes cached requests)",
    "nv_inference_compute_input_duration_us": "Cumulative compute input duration in microseconds (does not include cached requests)",
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds (does not include cached requests)"
    ),
}


class TritonMetrics:
    """The counters of this process for Triton's models."""

    def __init__(self, registry: CollectorRegistry, buffer: CounterBuffer) -> None:
        self.counter_buffer = buffer
        self._counters = {name: Counter(name, text, LABELS, registry=registry) for name, text in _COUNTERS.items()}
        self._failures = Counter(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            ("model", "reason", "version"),
            registry=registry,
        )
        self._failed_us = Counter(
            TRITON_FAILED_DURATION.name, TRITON_FAILED_DURATION.help, TRITON_FAILED_DURATION.labels, registry=registry
        )
        self._first = Histogram(
            "nv_inference_first_response_histogram_ms",
            "Duration from request to first response in milliseconds",
            LABELS,
            buckets=FIRST_RESPONSE_MS,
            registry=registry,
        )
        self._models: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        """The counters of a model. They exist until the process ends; clients cannot create model names."""
        if model not in self._models:
            self._models[model] = ModelCounts(self, model)
        return self._models[model]


class ModelCounts:
    """The counters of one model."""

    def __init__(self, counts: TritonMetrics, model: str) -> None:
        buffer = counts.counter_buffer
        counters = {name: buffer.counter(counter.labels(model, VERSION)) for name, counter in counts._counters.items()}
        self._success = counters["nv_inference_request_success"]
        self._inferences = counters["nv_inference_count"]
        self._duration = counters["nv_inference_request_duration_us"]
        self._failures = {reason: buffer.counter(counts._failures.labels(model, reason, VERSION)) for reason in FAILURES}
        self._failed_us = buffer.counter(counts._failed_us.labels(model, VERSION))
        self._first = buffer.histogram(counts._first.labels(model, VERSION))
        self.last_ms = 0  # Unix time of the last inference

    def succeeded(self, rows: int, duration_us: int) -> None:
        """Count a successful inference of `rows` rows."""
        self._success.inc()
        self._inferences.inc(rows)
        self._duration.inc(duration_us)
        self.last_ms = time.time_ns() // 1_000_000

    def failed(self, reason: str, duration_us: int) -> None:
        """Count a failed inference. `reason` is one of Triton's failure reasons."""
        self._failures[reason].inc()
        self._failed_us.inc(duration_us)

    def responded_first(self, duration_us: int) -> None:
        """Count the time from the request to its first response."""
        self._first.observe(duration_us / 1000)

    def statistics(self) -> dict[str, Any]:
        """The statistics of this process, with the fields and in the order of Triton's."""
        count, ns = self._success.value, self._duration.value * 1000
        failed = sum(counter.value for counter in self._failures.values())
        zero = {"count": 0, "ns": 0}
        infer = {"count": count, "ns": ns}
        return {
            "last_inference": self.last_ms,
            "inference_count": self._inferences.value,
            "execution_count": count,
            "inference_stats": {
                "success": infer,
                "fail": {"count": failed, "ns": self._failed_us.value * 1000},
                "queue": {"count": count, "ns": 0},
                "compute_input": {"count": count, "ns": 0},
                "compute_infer": infer,
                "compute_output": {"count": count, "ns": 0},
                "cache_hit": zero,
                "cache_miss": zero,
            },
            "response_stats": {},
            "batch_stats": [],
            "memory_usage": [],
        }


class Timer:
    """Counts one request for a model and its members, as a success or a failure, when the block ends."""

    def __init__(self, counts: list[ModelCounts], rows: int) -> None:
        self._counts, self._rows = counts, rows
        self._started = time.perf_counter()
        self._responded = False

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        duration = self.elapsed_us()
        for count in self._counts:
            if error is None:
                count.succeeded(self._rows, duration)
            else:
                count.failed(_reason(error), duration)

    def elapsed_us(self) -> int:
        """The microseconds since the request arrived."""
        return int((time.perf_counter() - self._started) * 1e6)

    def responded(self) -> None:
        """A response is sent. Only the first call counts."""
        if not self._responded:
            self._responded = True
            self._counts[0].responded_first(self.elapsed_us())


def _reason(error: BaseException) -> str:
    """The label value of nv_inference_request_failure for an error."""
    if not isinstance(error, Exception):
        return "CANCELED"
    status = getattr(error, "status", 500)
    return "REJECTED" if status in (429, 503) else "BACKEND" if status >= 500 else "OTHER"


def triton_names(exposition: bytes) -> bytes:
    """The exposition with Triton's counter names, and with the families of _COPIES and _ZEROS."""
    text = re.sub(r"(?m)^((?:# (?:HELP|TYPE) )?nv_\w+?)_total(?=[ {])", r"\1", exposition.decode())
    families = [text]
    for name, (source, help_text) in _COPIES.items():
        families.append(_family(name, help_text, [line.replace(source, name, 1) for line in _samples(text, source)]))
    successes = _samples(text, "nv_inference_request_success")
    for name, help_text in _ZEROS.items():
        labels = [line.removeprefix("nv_inference_request_success").rpartition(" ")[0] for line in successes]
        families.append(_family(name, help_text, [f"{name}{label_values} 0" for label_values in labels]))
    return "".join(families).encode()


def _samples(text: str, name: str) -> list[str]:
    """The sample lines of one metric in Prometheus' text format."""
    return re.findall(rf"(?m)^{name}{{.*$", text)


def _family(name: str, help_text: str, samples: list[str]) -> str:
    """The text of one counter: help, type and sample lines."""
    return "\n".join([f"# HELP {name} {help_text}", f"# TYPE {name} counter", *samples, ""])
