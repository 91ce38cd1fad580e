"""One row of a request's tensors, by role: what each asks for, read once and typed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from stoker.base.errors import RequestError
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference

_NO_ENCODER = "there is no encoder"
_NO_TABLES = "there are no prompt tables"
_NO_ADAPTERS = "there are no adapters"
_NO_LOGITS = "logits are not returned; return_log_probs is"
_NO_DRAFT = "there is no draft model"
_TEXT_ONLY = "this model reads text only"
_NO_RETENTION = "KV blocks are kept by use, without priorities"
_IN_METRICS = "see /metrics"
# Inputs that cannot be honoured, by role, with the reason.
REFUSED = {
    "decoder_text_input": _NO_ENCODER, "DECODER_QUERY": _NO_ENCODER, "encoder_input_features": _NO_ENCODER,
    "encoder_output_lengths": _NO_ENCODER, "cross_attention_mask": _NO_ENCODER, "skip_cross_attn_blocks": _NO_ENCODER,
    "prompt_embedding_table": _NO_TABLES, "prompt_vocab_size": _NO_TABLES, "prompt_table_extra_id": _NO_TABLES,
    "prompt_table_extra_ids": _NO_TABLES, "PROMPT_TABLE_EXTRA_ID": _NO_TABLES, "lora_task_id": _NO_ADAPTERS, "lora_weights": _NO_ADAPTERS,
    "lora_config": _NO_ADAPTERS, "return_context_logits": _NO_LOGITS, "return_generation_logits": _NO_LOGITS,
    "return_kv_cache_reuse_stats": _IN_METRICS, "return_perf_metrics": _IN_METRICS, "num_draft_tokens": _NO_DRAFT,
    "use_draft_logits": _NO_DRAFT, "draft_input_ids": _NO_DRAFT, "draft_logits": _NO_DRAFT, "draft_acceptance_threshold": _NO_DRAFT,
    "lookahead_window_size": _NO_DRAFT, "lookahead_ngram_size": _NO_DRAFT, "lookahead_verification_set_size": _NO_DRAFT,
    "image_input": _TEXT_ONLY, "image_bytes_input": _TEXT_ONLY, "image_url_input": _TEXT_ONLY, "video_bytes_input": _TEXT_ONLY,
    "IMAGE_BYTES": _TEXT_ONLY, "IMAGE_URL": _TEXT_ONLY, "VIDEO_BYTES": _TEXT_ONLY, "IMAGES": _TEXT_ONLY, "mrope_rotary_cos_sin": _TEXT_ONLY,
    "mrope_position_deltas": _TEXT_ONLY, "context_phase_params": "prefill and decode run in one executor",
    "retention_token_range_starts": _NO_RETENTION, "retention_token_range_ends": _NO_RETENTION,
    "retention_token_range_priorities": _NO_RETENTION, "retention_token_range_durations_ms": _NO_RETENTION,
    "retention_decode_priority": _NO_RETENTION, "retention_decode_duration_ms": _NO_RETENTION,
}  # fmt: skip
# Values that ask for nothing, of inputs that are refused otherwise.
NEUTRAL: dict[str, float] = {
    "runtime_top_p_min": 0.0, "runtime_top_p_decay": 1.0, "runtime_top_p_reset_ids": -1, "beam_search_diversity_rate": 0.0,
}  # fmt: skip


class Row:
    """Row `index` of an inference's inputs. Reading a value that is missing gives the default."""

    def __init__(self, inference: Inference, index: int) -> None:
        self.index = index
        batched = inference.model.max_batch_size > 0
        self._arrays = {role: array[index] if batched else array for role, array in inference.inputs.items()}

    @property
    def roles(self) -> Iterable[str]:
        """What was given."""
        return self._arrays.keys()

    def refuse_what_cannot_be(self) -> None:
        """Raises RequestError for an input that asks for something that Stoker does not do."""
        for role, array in self._arrays.items():
            if role in REFUSED and _asks(array):
                raise RequestError(role, _shown(array), REFUSED[role], cure="Leave it out.")
            if role in NEUTRAL and array.size and not abs(float(array.flat[0]) - NEUTRAL[role]) <= 1e-5:
                raise RequestError(role, _shown(array), f"only {NEUTRAL[role]:g} is honoured", cure="Leave it out.")

    def value(self, role: str, default: Any = None) -> Any:
        """A scalar as Python has it; text is decoded."""
        array = self._arrays.get(role)
        if array is None or not array.size:
            return default
        item = array.flat[0]
        return _text(role, item) if isinstance(item, bytes) else item.item()

    def array(self, role: str) -> np.ndarray | None:
        return self._arrays.get(role)

    def ids(self, role: str) -> list[int]:
        array = self._arrays.get(role)
        return [] if array is None else array.ravel().tolist()

    def texts(self, role: str) -> list[str]:
        """The strings of a list; empty ones, as templates send them, ask for nothing."""
        array = self._arrays.get(role)
        return [] if array is None else [text for item in array.flat if (text := _text(role, item))]


def rows(inference: Inference) -> list[Row]:
    count = len(next(iter(inference.inputs.values()))) if inference.model.max_batch_size else 1
    return [Row(inference, index) for index in range(count)]


def _asks(array: np.ndarray) -> bool:
    """Whether there is anything but false, empty lists and empty strings in it. A zero of a number is a value: adapter 0 exists."""
    if array.dtype in (bool, object):
        return any(bool(item) for item in array.flat)
    return array.size > 0


def _shown(array: np.ndarray) -> Any:
    return array.flat[0] if array.size == 1 else f"a tensor of shape {list(array.shape)}"


def _text(role: str, item: bytes) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise TritonError(f"input '{role}' is no UTF-8 at byte {error.start}") from None
