"""TensorRT-LLM's gauges, computed from an executor's statistics at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from stoker.runtime.request import ExecutorStats

VERSION = "1"
LABELS = ("model", "version")


def executor_families(stats: dict[str, ExecutorStats]) -> Iterable[Metric]:
    """TensorRT-LLM's gauges at a scrape. A single executor is reported as the model tensorrt_llm, several by their names."""
    by_model = {"tensorrt_llm" if len(stats) == 1 else name: model_stats for name, model_stats in stats.items()}
    for name, (text, label, values) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=("model", label, "version"))
        for model, model_stats in by_model.items():
            for value, number in values(model_stats).items():
                family.add_metric([model, value, VERSION], number)
        yield family
    pending = GaugeMetricFamily(
        "nv_inference_pending_request_count", "Instantaneous number of pending requests awaiting execution per-model.", labels=LABELS
    )
    for model, model_stats in by_model.items():
        pending.add_metric([model, VERSION], model_stats.num_waiting)
    yield pending


def _requests(stats: ExecutorStats) -> dict[str, float]:
    """The values of the gauges of requests, by their label."""
    return {
        "active": stats.num_running + stats.num_waiting,
        "max": stats.max_batch_size,
        "scheduled": stats.last_step_rows,
        "context": _context_requests(stats),
        "waiting": stats.num_waiting,
    }


def _context_requests(stats: ExecutorStats) -> int:
    """Sequences in prefill. The executor reports only whether its last step had any."""
    return min(stats.num_running, 1 if stats.last_step_prefill_tokens else 0)


def _memory(stats: ExecutorStats) -> dict[str, float]:
    """The values of the gauges of allocated memory, in bytes."""
    return {"cpu": 0, "gpu": stats.weight_bytes + stats.kv_bytes, "pinned": 0}


def _blocks(stats: ExecutorStats) -> dict[str, float]:
    """The values of the gauges of the key-value cache, in blocks."""
    used = stats.num_blocks - stats.num_free_blocks
    return {
        "max": stats.num_blocks,
        "free": stats.num_free_blocks,
        "used": used,
        "tokens_per": stats.tokens_per_block,
        "reused": stats.num_reused_tokens // max(1, stats.tokens_per_block),
        "fraction": used / max(1, stats.num_blocks),
    }


def _batcher(stats: ExecutorStats) -> dict[str, float]:
    """The values of the gauges of inflight batching."""
    generating = stats.num_running - _context_requests(stats)
    return {
        "total_context_tokens": stats.last_step_prefill_tokens,
        "generation_requests": generating,
        "micro_batch_id": 0,
        "paused_requests": stats.num_paused,
    }


def _general(stats: ExecutorStats) -> dict[str, float]:
    """The time in microseconds since 1970, and the number of steps so far."""
    return {"timestamp": int(time.time() * 1e6), "iteration_counter": stats.num_steps}


# Name → (help, label, values of the label).
_GAUGES: dict[str, tuple[str, str, Callable[[ExecutorStats], dict[str, float]]]] = {
    "nv_trt_llm_request_metrics": ("TRT LLM request metrics", "request_type", _requests),
    "nv_trt_llm_runtime_memory_metrics": ("TRT LLM runtime memory metrics", "memory_type", _memory),
    "nv_trt_llm_kv_cache_block_metrics": ("TRT LLM KV cache block metrics", "kv_cache_block_type", _blocks),
    "nv_trt_llm_inflight_batcher_metrics": (
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        _batcher,
    ),
    "nv_trt_llm_general_metrics": ("General TRT LLM metrics", "general_type", _general),
}
