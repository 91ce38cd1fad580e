"""The outputs that an input of the request enables: KV cache blocks, times, drafts, and numbers of tokens. Each is [1, 1].

Times are nanoseconds of the monotonic clock, as in TensorRT-LLM. Each response of a stream has them, because clients read them in each.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stoker.base.types import Delta
from stoker.frontend.stopwatch import Stopwatch
from stoker.server.protocols.kserve.inference import Tensors
from stoker.server.protocols.kserve.models.results import SequencePart
from stoker.server.protocols.kserve.tensors.input_row import InputRow


class RequestedMetrics(msgspec.Struct, frozen=True):
    """Which groups of outputs are requested, by the input that enables each."""

    return_kv_cache_reuse_stats: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


_NONE = RequestedMetrics()


def requested_metrics(row: InputRow) -> RequestedMetrics | None:
    """What a row requests; None if nothing."""
    requested = RequestedMetrics(*(row.value(name, False) for name in RequestedMetrics.__struct_fields__))
    return requested if requested != _NONE else None


class SequenceClock:
    """Measures one streamed sequence."""

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self._num_tokens = 0
        self._first: Delta | None = None

    def measure(self, delta: Delta, part: SequencePart) -> None:
        """Count the tokens of `delta`. `part` receives the admission and the timings of the sequence so far."""
        self._num_tokens += len(delta.token_ids)
        if delta.token_ids and self._first is None:
            self._first = delta
            self._stopwatch.token(delta.admission)
        part.admission = self._first.admission if self._first is not None else None
        part.timings = self._stopwatch.timings([self._num_tokens])
        part.num_drafts, part.num_accepted = delta.draft_tokens, delta.accepted_draft_tokens


def metric_outputs(requested: RequestedMetrics, parts: list[SequencePart], *, arrival_s: float, num_prompt: int) -> Tensors:
    """The requested outputs that are known for these parts. `arrival_s`: monotonic time at which the request arrived."""
    outputs: Tensors = {}
    if requested.return_num_input_tokens:
        outputs["num_input_tokens"] = np.array([[num_prompt]], np.int32)
    if requested.return_num_output_tokens:
        outputs["num_output_tokens"] = np.array([[sum(len(part.token_ids) for part in parts)]], np.int32)
    if requested.return_perf_metrics or requested.return_kv_cache_reuse_stats:
        outputs |= _blocks(parts[0])
    if requested.return_perf_metrics:
        outputs |= _times(parts[0], arrival_s)
    return outputs


def _blocks(part: SequencePart) -> Tensors:
    """The numbers of KV cache blocks that the sequence got when it was admitted. Empty if unknown."""
    if (admission := part.admission) is None:
        return {}
    return {
        "kv_cache_alloc_new_blocks": np.array([[admission.num_new_blocks]], np.int32),
        "kv_cache_reused_blocks": np.array([[admission.num_reused_blocks]], np.int32),
        "kv_cache_alloc_total_blocks": np.array([[admission.num_allocated_blocks]], np.int32),
    }


def _times(part: SequencePart, arrival_s: float) -> Tensors:
    """The times of the sequence in nanoseconds, and its draft tokens. `arrival_s` is on the monotonic clock. Empty if unknown."""
    if (timings := part.timings) is None:
        return {}
    seconds = {
        "arrival_time_ns": 0.0,
        "first_scheduled_time_ns": timings.queue_s,
        "first_token_time_ns": timings.time_to_first_token_s,
        "last_token_time_ns": timings.total_s,
    }
    drafts: Tensors = {
        "acceptance_rate": np.array([[part.num_accepted / max(part.num_drafts, 1)]], np.float32),
        "total_accepted_draft_tokens": np.array([[part.num_accepted]], np.int32),
        "total_draft_tokens": np.array([[part.num_drafts]], np.int32),
    }
    return {name: np.array([[int((arrival_s + after) * 1e9)]], np.int64) for name, after in seconds.items()} | drafts
