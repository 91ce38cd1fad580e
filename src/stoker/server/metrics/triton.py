"""Metrics under Triton's and TensorRT-LLM's names. Each model's figures are also what its statistics are made of.

prometheus-client would write `_total` behind a counter's name; Triton does not, so `triton_names` takes it away again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from stoker.runtime.request import ExecutorStats
from stoker.server.metrics.counters import CounterBuffer

VERSION = "1"
LABELS = ("model", "version")
FAILURES = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0, 10000.0)

_COUNTERS = {
    "nv_inference_request_success": "Number of successful inference requests, all batch sizes",
    "nv_inference_count": "Number of inferences performed (does not include cached requests)",
    "nv_inference_request_duration_us": "Cumulative inference request duration in microseconds (includes cached requests)",
}
# Families that repeat another's figures: a request is executed once, and nothing but its inference takes time here. Not counting them
# a second time saves 20 µs a request.
_COPIES = {
    "nv_inference_exec_count": (
        "nv_inference_request_success", "Number of model executions performed (does not include cached requests)",
    ),
    "nv_inference_compute_infer_duration_us": (
        "nv_inference_request_duration_us", "Cumulative compute inference duration in microseconds (does not include cached requests)",
    ),
}  # fmt: skip
# What a fused model does not spend: its requests wait in the executor's queue, whose metrics are stoker_*.
_ZEROS = {
    "nv_inference_queue_duration_us": "Cumulative inference queuing duration in microseconds (includes cached requests)",
    "nv_inference_compute_input_duration_us": "Cumulative compute input duration in microseconds (does not include cached requests)",
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds (does not include cached requests)"
    ),
}


class TritonMetrics:
    """What this process counts of Triton's models."""

    def __init__(self, registry: CollectorRegistry, buffer: CounterBuffer) -> None:
        self.counter_buffer = buffer
        self._counters = {name: Counter(name, text, LABELS, registry=registry) for name, text in _COUNTERS.items()}
        self._failures = Counter(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            ("model", "reason", "version"),
            registry=registry,
        )
        self._failed_us = Counter("stoker_triton_failed_duration_us", "Cumulative duration of failed requests.", LABELS, registry=registry)
        self._first = Histogram(
            "nv_inference_first_response_histogram_ms", "Duration from request to first response in milliseconds", LABELS,
            buckets=FIRST_RESPONSE_MS, registry=registry,
        )  # fmt: skip
        self._models: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        """Kept for the life of the process; models are few, and named by the server."""
        if model not in self._models:
            self._models[model] = ModelCounts(self, model)
        return self._models[model]


class ModelCounts:
    """The counts of one model. `pending` requests have no response yet."""

    def __init__(self, counts: TritonMetrics, model: str) -> None:
        buffer = counts.counter_buffer
        of = {name: buffer.counter(counter.labels(model, VERSION)) for name, counter in counts._counters.items()}
        self._success = of["nv_inference_request_success"]
        self._inferences = of["nv_inference_count"]
        self._duration = of["nv_inference_request_duration_us"]
        self._failures = {reason: buffer.counter(counts._failures.labels(model, reason, VERSION)) for reason in FAILURES}
        self._failed_us = buffer.counter(counts._failed_us.labels(model, VERSION))
        self._first = buffer.histogram(counts._first.labels(model, VERSION))
        self.last_ms = 0  # Unix time of the last inference

    def succeeded(self, rows: int, duration_us: int) -> None:
        self._success.inc()
        self._inferences.inc(rows)
        self._duration.inc(duration_us)
        self.last_ms = time.time_ns() // 1_000_000

    def failed(self, reason: str, duration_us: int) -> None:
        self._failures[reason].inc()
        self._failed_us.inc(duration_us)

    def responded_first(self, duration_us: int) -> None:
        self._first.observe(duration_us / 1000)

    def statistics(self) -> dict[str, Any]:
        """This process's share, in the fields and order of Triton's statistics."""
        count, ns = self._success.value, self._duration.value * 1000
        failed = sum(counter.value for counter in self._failures.values())
        none = {"count": 0, "ns": 0}
        infer = {"count": count, "ns": ns}
        return {
            "last_inference": self.last_ms, "inference_count": self._inferences.value, "execution_count": count,
            "inference_stats": {
                "success": infer, "fail": {"count": failed, "ns": self._failed_us.value * 1000}, "queue": {"count": count, "ns": 0},
                "compute_input": {"count": count, "ns": 0}, "compute_infer": infer, "compute_output": {"count": count, "ns": 0},
                "cache_hit": none, "cache_miss": none,
            },
            "response_stats": {}, "batch_stats": [], "memory_usage": [],
        }  # fmt: skip


class Timer:
    """Counts one request for every model concerned, by how the block ends."""

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
        return int((time.perf_counter() - self._started) * 1e6)

    def responded(self) -> None:
        if not self._responded:
            self._responded = True
            self._counts[0].responded_first(self.elapsed_us())


def _reason(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return "CANCELED"
    status = getattr(error, "status", 500)
    return "REJECTED" if status in (429, 503) else "BACKEND" if status >= 500 else "OTHER"


def executor_families(stats: dict[str, ExecutorStats]) -> Iterable[Metric]:
    """TensorRT-LLM's gauges at the moment of a scrape. One executor is the model tensorrt_llm; of several, each has its own name."""
    named = {"tensorrt_llm" if len(stats) == 1 else name: of_one for name, of_one in stats.items()}
    for name, (text, label, values) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=("model", label, "version"))
        for model, of_one in named.items():
            for value, number in values(of_one).items():
                family.add_metric([model, value, VERSION], number)
        yield family
    pending = GaugeMetricFamily(
        "nv_inference_pending_request_count", "Instantaneous number of pending requests awaiting execution per-model.", labels=LABELS
    )
    for model, of_one in named.items():
        pending.add_metric([model, VERSION], of_one.num_waiting)
    yield pending


def _requests(stats: ExecutorStats) -> dict[str, float]:
    return {
        "active": stats.num_running + stats.num_waiting, "max": stats.max_batch_size, "scheduled": stats.last_step_rows,
        "context": _context_requests(stats), "waiting": stats.num_waiting,
    }  # fmt: skip


def _context_requests(stats: ExecutorStats) -> int:
    """Sequences still in prefill; the executor tells only whether its last step had any."""
    return min(stats.num_running, 1 if stats.last_step_prefill_tokens else 0)


def _memory(stats: ExecutorStats) -> dict[str, float]:
    return {"cpu": 0, "gpu": stats.weight_bytes + stats.kv_bytes, "pinned": 0}


def _blocks(stats: ExecutorStats) -> dict[str, float]:
    used = stats.num_blocks - stats.num_free_blocks
    return {
        "max": stats.num_blocks, "free": stats.num_free_blocks, "used": used, "tokens_per": stats.tokens_per_block,
        "reused": stats.num_reused_tokens // max(1, stats.tokens_per_block), "fraction": used / max(1, stats.num_blocks),
    }  # fmt: skip


def _batcher(stats: ExecutorStats) -> dict[str, float]:
    generating = stats.num_running - _context_requests(stats)
    return {
        "total_context_tokens": stats.last_step_prefill_tokens, "generation_requests": generating, "micro_batch_id": 0,
        "paused_requests": stats.num_paused,
    }  # fmt: skip


def _general(stats: ExecutorStats) -> dict[str, float]:
    return {"timestamp": int(time.time() * 1e6), "iteration_counter": stats.num_steps}


# Name → (help, label, values of the label).
_GAUGES: dict[str, tuple[str, str, Callable[[ExecutorStats], dict[str, float]]]] = {
    "nv_trt_llm_request_metrics": ("TRT LLM request metrics", "request_type", _requests),
    "nv_trt_llm_runtime_memory_metrics": ("TRT LLM runtime memory metrics", "memory_type", _memory),
    "nv_trt_llm_kv_cache_block_metrics": ("TRT LLM KV cache block metrics", "kv_cache_block_type", _blocks),
    "nv_trt_llm_inflight_batcher_metrics": (
        "TRT LLM inflight_batcher-specific metrics", "inflight_batcher_specific_metric", _batcher,
    ),
    "nv_trt_llm_general_metrics": ("General TRT LLM metrics", "general_type", _general),
}  # fmt: skip


def triton_names(exposition: bytes) -> bytes:
    """The exposition with Triton's own names for its counters, and the families that follow from others."""
    text = re.sub(r"(?m)^((?:# (?:HELP|TYPE) )?nv_\w+?)_total(?=[ {])", r"\1", exposition.decode())
    pieces = [text]
    for name, (source, what) in _COPIES.items():
        pieces.append(_family(name, what, [line.replace(source, name, 1) for line in _samples(text, source)]))
    successes = _samples(text, "nv_inference_request_success")
    for name, what in _ZEROS.items():
        labels = [line.removeprefix("nv_inference_request_success").rpartition(" ")[0] for line in successes]
        pieces.append(_family(name, what, [f"{name}{of_one} 0" for of_one in labels]))
    return "".join(pieces).encode()


def _samples(text: str, name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}{{.*$", text)


def _family(name: str, what: str, samples: list[str]) -> str:
    return "\n".join([f"# HELP {name} {what}", f"# TYPE {name} counter", *samples, ""])
