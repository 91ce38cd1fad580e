"""The field tables of `parameters` in an inflight_batcher_llm repository, v0.5 to 1.x. `load`, `lint` and `export` use them."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.table import FieldRow, FieldTable
from stoker.base.fields.values import ValueType, Whole, exactly
from stoker.base.nodes import MAX_NODES
from stoker.deploy.triton.values import (
    BOOLEAN,
    DRAFT_HEAD_MODES,
    LOOKAHEAD,
    NUMBER,
    STRTOBOOL,
    TEXT,
    WHOLE,
    AttentionWindow,
    DeviceIndices,
    DraftChoices,
    GptModelType,
    ParticipantIds,
    decoding_mode,
)
from stoker.server.protocols.kserve.model_config import DECODING_MODES, KINDS, TritonOptions

BATCHING = ("V1", "v1", "inflight_batching", "inflight_fused_batching")
POLICIES = ("guaranteed_no_evict", "max_utilization")
# Section of a target → the struct that checks the range of its values.
_RANGE_CHECKS: dict[str, type[msgspec.Struct]] = {"runtime": RuntimeConfig, "options": TritonOptions}


class ParameterRow(FieldRow, frozen=True, kw_only=True):
    """One key of a model's `parameters`.

    `target` is runtime.FIELD, options.FIELD, server.FIELD, or a name that `load` converts. `since` and `until` are the first and last
    release of tensorrtllm_backend whose templates have the key.
    """

    model: str  # kind of the model that declares it
    default: str = ""  # the value of an unset key, for messages
    required: bool = False
    lenient: bool = False  # a value that cannot be read counts as unset, as in tensorrtllm_backend
    warn: bool = False  # the note of an unset key, or of a key without effect, is a warning
    since: str = ""
    until: str = ""

    def parse(self, text: str) -> Any:
        """The checked value, within the range of its target. Raises InvalidValueError."""
        value = super().parse(text)
        section, _, field = self.target.partition(".")
        if section in _RANGE_CHECKS:
            try:
                _RANGE_CHECKS[section](**{field: value})
            except ConfigError as error:
                raise InvalidValueError(text, "it is outside the supported range", cure=error.cure) from None
        return value


def _accepted(model: str, name: str, type: ValueType, target: str, since: str, **more: Any) -> ParameterRow:
    """A row for a parameter that is used."""
    return ParameterRow(model=model, name=name, status="accepted", type=type, target=target, since=since, **more)


def _no_effect(model: str, name: str, type: ValueType, reason: str, since: str, **more: Any) -> ParameterRow:
    """A row for a parameter without effect."""
    return ParameterRow(model=model, name=name, status="no effect", type=type, reason=reason, since=since, **more)


def _rejected(model: str, name: str, type: ValueType, reason: str, since: str, **more: Any) -> ParameterRow:
    """A row for a parameter that is not supported."""
    return ParameterRow(model=model, name=name, status="rejected", type=type, reason=reason, since=since, **more)


PRE, POST, LLM, BLS = "preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls"
ENGINE_DIR = "engine_dir"  # of the Python gpt model of release 0.5, instead of gpt_model_path and gpt_model_type
_NO_VISION = "Stoker serves text models only"
_NO_ENCODER = "Stoker serves decoder-only models"
_NO_DRAFT_MODEL = "draft models are not served"
_LOOKAHEAD = "prompt lookup (decoding_mode lookahead) has no windows; answers are the same for every value"
_NO_ADAPTERS = "adapters are not supported; a request with one is refused"

_ROWS = (
    _accepted(PRE, "tokenizer_dir", TEXT, "tokenizer", "0.5"),
    _no_effect(PRE, "tokenizer_type", exactly("auto", "t5", "llama"), "the type is read from the tokenizer files", "0.5", until="0.8"),
    _accepted(PRE, "add_special_tokens", BOOLEAN, "server.add_special_tokens", "0.7", default="true", lenient=True, warn=True),
    _rejected(PRE, "visual_model_path", TEXT, _NO_VISION, "0.12", until="0.18"),
    _rejected(PRE, "multimodal_model_path", TEXT, _NO_VISION, "0.19"),
    _no_effect(PRE, "gpt_model_path", TEXT, "only models with images use it", "0.12"),
    _no_effect(PRE, "engine_dir", TEXT, "only models with images use it", "0.12"),
    _no_effect(PRE, "hf_model_path", TEXT, "only models with images use it", "1.x"),
    _no_effect(PRE, "max_num_images", WHOLE, "only models with images use it", "0.15"),
    _accepted(POST, "tokenizer_dir", TEXT, "tokenizer", "0.5"),
    _no_effect(POST, "tokenizer_type", exactly("auto", "t5", "llama"), "the type is read from the tokenizer files", "0.5", until="0.8"),
    _accepted(POST, "skip_special_tokens", BOOLEAN, "server.skip_special_tokens", "0.7", default="true", lenient=True, warn=True),
    _accepted(BLS, "accumulate_tokens", STRTOBOOL, "options.accumulate_tokens", "0.7", default="false"),
    _accepted(BLS, "tensorrt_llm_model_name", TEXT, "bls_target", "0.9", default="tensorrt_llm"),
    _rejected(BLS, "tensorrt_llm_draft_model_name", TEXT, _NO_DRAFT_MODEL, "0.9"),
    _rejected(BLS, "multimodal_encoders_name", TEXT, _NO_VISION, "0.13"),
    _accepted(LLM, "gpt_model_type", GptModelType(BATCHING), "batching", "0.5", required=True),
    _accepted(LLM, "gpt_model_path", TEXT, "engine", "0.5", required=True),
    _accepted(LLM, ENGINE_DIR, TEXT, "engine", "0.5"),
    _rejected(LLM, "encoder_model_path", TEXT, _NO_ENCODER, "0.11"),
    _accepted(LLM, "max_beam_width", WHOLE, "options.max_beam_width", "0.5", default="1"),
    _no_effect(LLM, "FORCE_CPU_ONLY_INPUT_TENSORS", exactly("no", "yes"), "inputs are always read from host memory", "0.5"),
    _accepted(LLM, "batch_scheduler_policy", exactly(*POLICIES), "runtime.policy", "0.5", default="guaranteed_no_evict"),
    _accepted(LLM, "max_tokens_in_paged_kv_cache", WHOLE, "runtime.kv_cache_tokens", "0.5"),
    _accepted(LLM, "kv_cache_free_gpu_mem_fraction", NUMBER, "runtime.kv_cache_fraction", "0.5"),
    _accepted(LLM, "max_num_sequences", WHOLE, "runtime.max_num_sequences", "0.5", until="0.7.2"),
    _accepted(LLM, "max_attention_window_size", AttentionWindow(), "runtime.attention_window", "0.7"),
    _accepted(LLM, "max_kv_cache_length", AttentionWindow(), "runtime.attention_window", "0.6", until="0.6"),
    _rejected(LLM, "sink_token_length", WHOLE, "attention windows have no sink tokens", "0.10", harmless=(0,)),
    _rejected(LLM, "cross_kv_cache_fraction", NUMBER, _NO_ENCODER, "0.14"),
    _rejected(LLM, "kv_cache_host_memory_bytes", WHOLE, "KV blocks are not moved to host memory", "0.10", harmless=(0,)),
    _no_effect(LLM, "kv_cache_onboard_blocks", BOOLEAN, "it is a setting of kv_cache_host_memory_bytes", "0.10"),
    _accepted(LLM, "enable_trt_overlap", BOOLEAN, "runtime.overlap", "0.5"),
    _accepted(LLM, "exclude_input_in_output", BOOLEAN, "options.exclude_input_in_output", "0.6", default="false"),
    _no_effect(LLM, "cancellation_check_period_ms", WHOLE, "a cancelled request ends within one step", "0.10"),
    _no_effect(LLM, "stats_check_period_ms", WHOLE, "statistics are always counted", "0.10"),
    _no_effect(LLM, "recv_poll_period_ms", WHOLE, "the executor does not poll", "1.x"),
    _no_effect(LLM, "iter_stats_max_iterations", WHOLE, "statistics are counters, not records", "0.10"),
    _rejected(LLM, "request_stats_max_iterations", WHOLE, "statistics per request are outputs of the response", "0.10", harmless=(0,)),
    _accepted(LLM, "enable_kv_cache_reuse", BOOLEAN, "runtime.prefix_reuse", "0.7"),
    _accepted(LLM, "normalize_log_probs", BOOLEAN, "options.normalize_log_probs", "0.8", default="true"),
    _accepted(LLM, "enable_chunked_context", BOOLEAN, "runtime.chunked_prefill", "0.8"),
    _accepted(LLM, "gpu_device_ids", DeviceIndices(), "runtime.devices", "0.8"),
    _accepted(LLM, "participant_ids", ParticipantIds(), "nodes.participants", "0.13"),
    _accepted(LLM, "num_nodes", Whole(1, MAX_NODES), "nodes.num_nodes", "0.19", default="1"),
    _no_effect(LLM, "lora_cache_optimal_adapter_size", WHOLE, _NO_ADAPTERS, "0.9"),
    _no_effect(LLM, "lora_cache_max_adapter_size", WHOLE, _NO_ADAPTERS, "0.9"),
    _no_effect(LLM, "lora_cache_gpu_memory_fraction", NUMBER, _NO_ADAPTERS, "0.9"),
    _no_effect(LLM, "lora_cache_host_memory_bytes", WHOLE, _NO_ADAPTERS, "0.9"),
    _rejected(LLM, "lora_prefetch_dir", TEXT, "adapters are not supported", "0.19"),
    _accepted(LLM, "decoding_mode", decoding_mode(*DECODING_MODES, LOOKAHEAD, *DRAFT_HEAD_MODES), "decoding_mode", "0.9"),
    _accepted(LLM, "medusa_choices", DraftChoices(), "medusa_choices", "0.9"),
    _accepted(LLM, "eagle_choices", DraftChoices(), "eagle_choices", "0.16"),
    _no_effect(LLM, "lookahead_window_size", WHOLE, _LOOKAHEAD, "0.19"),
    _no_effect(LLM, "lookahead_ngram_size", WHOLE, _LOOKAHEAD, "0.19"),
    _no_effect(LLM, "lookahead_verification_set_size", WHOLE, _LOOKAHEAD, "0.19"),
    _rejected(LLM, "speculative_decoding_fast_logits", BOOLEAN, _NO_DRAFT_MODEL, "0.15", harmless=(False,)),
    _accepted(LLM, "guided_decoding_backend", exactly("xgrammar"), "guided_decoding_backend", "0.19", default="xgrammar"),
    _accepted(LLM, "tokenizer_dir", TEXT, "tokenizer", "0.19"),
    _no_effect(LLM, "xgrammar_tokenizer_info_path", TEXT, "the grammar compiler reads the tokenizer files", "0.19"),
    _no_effect(LLM, "executor_worker_path", TEXT, "Stoker starts its own workers", "0.10"),
    _no_effect(
        LLM, "worker_path", TEXT, "Stoker starts its own workers; later releases of TensorRT-LLM reject it", "0.9", until="0.9", warn=True
    ),
    _rejected(LLM, "gpu_weights_percent", NUMBER, "all weights are on the device", "0.10", harmless=(1.0,)),
    _no_effect(LLM, "multi_block_mode", BOOLEAN, "attention selects split-KV by measurement", "0.12"),
    _no_effect(LLM, "enable_context_fmha_fp32_acc", BOOLEAN, "attention always accumulates in float32", "0.12"),
    _accepted(LLM, "cuda_graph_mode", BOOLEAN, "runtime.cuda_graphs", "0.15"),
    _no_effect(LLM, "cuda_graph_cache_size", WHOLE, "one graph is retained per bucket of batch sizes", "0.15"),
)

# Kind of model → its keys.
KEYS: dict[str, FieldTable[ParameterRow]] = {kind: FieldTable((row for row in _ROWS if row.model == kind), noun="key") for kind in KINDS}


def models_with_key(name: str) -> list[str]:
    """The kinds of models that have the parameter `name`."""
    return [kind for kind, table in KEYS.items() if name in table]
