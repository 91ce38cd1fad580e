"""Every `parameters` key of an inflight_batcher_llm repository, v0.5 to 1.x: what becomes of it. The one table of load, lint and export."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.deploy.triton import values
from stoker.deploy.triton.values import Read
from stoker.server.protocols.kserve.model_config import DECODING_MODES, TritonOptions

BATCHING = ("V1", "v1", "inflight_batching", "inflight_fused_batching")
POLICIES = ("guaranteed_no_evict", "max_utilization")
_CHECKED: dict[str, type[msgspec.Struct]] = {"runtime": RuntimeConfig, "options": TritonOptions}


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key. honoured: its value goes to `to`. ignored: read and checked, no effect, `why` says so. refused: unless in `allowed`."""

    kind: str  # of the model that declares it
    name: str
    handling: Literal["honoured", "ignored", "refused"]
    read: Read
    to: str = ""  # runtime.field, options.field, server.field, or a name that load gives a meaning
    default: str = ""  # what an unset key means
    why: str = ""  # ignored: the reason; refused: the cure
    allowed: tuple[Any, ...] = ()  # refused keys: values that ask for nothing
    required: bool = False
    lenient: bool = False  # an unreadable value counts as unset, as in the original
    warn: bool = False  # unset or ignored deserves a warning
    since: str = ""  # first and last tag whose template has the key
    until: str = ""

    def value(self, text: str) -> Any:
        """The checked value of `text`. Raises ConfigError without a place; the caller knows it."""
        value = self.read(self.name, text)
        if self.handling == "refused" and value not in self.allowed:
            raise ConfigError(f"{self.name}={text!r} is refused.", cure=self.why)
        section, _, field = self.to.partition(".")
        if section in _CHECKED:
            self._in_range(_CHECKED[section], field, value, text)
        return value

    def _in_range(self, owner: type[msgspec.Struct], field: str, value: Any, text: str) -> None:
        """The owner's own check, told in the words of the file."""
        try:
            owner(**{field: value})
        except ConfigError as error:
            raise ConfigError(f"{self.name}={text!r} is refused.", cure=error.cure) from None


def _key(kind: str, name: str, read: Read, handling: Literal["honoured", "ignored", "refused"], since: str, **more: Any) -> Key:
    return Key(kind=kind, name=name, read=read, handling=handling, since=since, **more)


def _to(kind: str, name: str, read: Read, to: str, since: str, **more: Any) -> Key:
    return _key(kind, name, read, "honoured", since, to=to, **more)


def _ignore(kind: str, name: str, read: Read, why: str, since: str, **more: Any) -> Key:
    return _key(kind, name, read, "ignored", since, why=why, **more)


def _refuse(kind: str, name: str, read: Read, cure: str, since: str, **more: Any) -> Key:
    return _key(kind, name, read, "refused", since, why=cure, **more)


PRE, POST, LLM, BLS = "preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls"
_NO_VISION = "Stoker serves text models; remove the key."
_NO_ENCODER = "Stoker serves decoders without an encoder; remove the key."
_NO_SPECULATION = "Stoker decodes without draft tokens; remove the key."
_NO_ADAPTERS = "no adapters are held; a request that carries one is refused"
_ONE_HOST = "Stoker starts its own ranks on one host; remove the key."

_ROWS = (
    _to(PRE, "tokenizer_dir", values.text, "tokenizer", "0.5"),
    _ignore(PRE, "tokenizer_type", values.choice("auto", "t5", "llama"), "the tokenizer's own files say its type", "0.5", until="0.8"),
    _to(PRE, "add_special_tokens", values.boolean, "server.add_special_tokens", "0.7", default="true", lenient=True, warn=True),
    _refuse(PRE, "visual_model_path", values.text, _NO_VISION, "0.12", until="0.18"),
    _refuse(PRE, "multimodal_model_path", values.text, _NO_VISION, "0.19"),
    _ignore(PRE, "gpt_model_path", values.text, "only image models read it here", "0.12"),
    _ignore(PRE, "engine_dir", values.text, "only image models read it here", "0.12"),
    _ignore(PRE, "hf_model_path", values.text, "only image models read it here", "1.x"),
    _ignore(PRE, "max_num_images", values.whole, "only image models read it here", "0.15"),
    _to(POST, "tokenizer_dir", values.text, "tokenizer", "0.5"),
    _ignore(POST, "tokenizer_type", values.choice("auto", "t5", "llama"), "the tokenizer's own files say its type", "0.5", until="0.8"),
    _to(POST, "skip_special_tokens", values.boolean, "server.skip_special_tokens", "0.7", default="true", lenient=True, warn=True),
    _to(BLS, "accumulate_tokens", values.truthy, "options.accumulate_tokens", "0.7", default="false"),
    _to(BLS, "tensorrt_llm_model_name", values.text, "bls_target", "0.9", default="tensorrt_llm"),
    _refuse(BLS, "tensorrt_llm_draft_model_name", values.text, _NO_SPECULATION, "0.9"),
    _refuse(BLS, "multimodal_encoders_name", values.text, _NO_VISION, "0.13"),
    _to(LLM, "gpt_model_type", values.batching(BATCHING), "batching", "0.5", required=True),
    _to(LLM, "gpt_model_path", values.text, "engine", "0.5", required=True),
    _refuse(LLM, "encoder_model_path", values.text, _NO_ENCODER, "0.11"),
    _to(LLM, "max_beam_width", values.whole, "options.max_beam_width", "0.5", default="1"),
    _ignore(LLM, "FORCE_CPU_ONLY_INPUT_TENSORS", values.choice("no", "yes"), "inputs are read where they arrive, in host memory", "0.5"),
    _to(LLM, "batch_scheduler_policy", values.choice(*POLICIES), "runtime.policy", "0.5", default="guaranteed_no_evict"),
    _to(LLM, "max_tokens_in_paged_kv_cache", values.whole, "runtime.kv_cache_tokens", "0.5"),
    _to(LLM, "kv_cache_free_gpu_mem_fraction", values.number, "runtime.kv_cache_fraction", "0.5"),
    _to(LLM, "max_num_sequences", values.whole, "runtime.max_num_sequences", "0.5", until="0.7.2"),
    _to(LLM, "max_attention_window_size", values.window, "runtime.attention_window", "0.7"),
    _to(LLM, "max_kv_cache_length", values.window, "runtime.attention_window", "0.6", until="0.6"),
    _refuse(LLM, "sink_token_length", values.whole, "Stoker keeps no attention sinks outside the window; set 0.", "0.10", allowed=(0,)),
    _refuse(LLM, "cross_kv_cache_fraction", values.number, _NO_ENCODER, "0.14"),
    _refuse(LLM, "kv_cache_host_memory_bytes", values.whole, "Stoker keeps no KV blocks in host memory; set 0.", "0.10", allowed=(0,)),
    _ignore(LLM, "kv_cache_onboard_blocks", values.boolean, "it matters with kv_cache_host_memory_bytes only", "0.10"),
    _to(LLM, "enable_trt_overlap", values.boolean, "runtime.overlap", "0.5"),
    _to(LLM, "exclude_input_in_output", values.boolean, "options.exclude_input_in_output", "0.6", default="false"),
    _ignore(LLM, "cancellation_check_period_ms", values.whole, "a cancelled request ends within one step", "0.10"),
    _ignore(LLM, "stats_check_period_ms", values.whole, "statistics are counted as they happen", "0.10"),
    _ignore(LLM, "recv_poll_period_ms", values.whole, "requests wake the executor; nothing polls", "1.x"),
    _ignore(LLM, "iter_stats_max_iterations", values.whole, "statistics are counters; none is dropped", "0.10"),
    _refuse(LLM, "request_stats_max_iterations", values.whole, "Per-request figures come with each answer; set 0.", "0.10", allowed=(0,)),
    _to(LLM, "enable_kv_cache_reuse", values.boolean, "runtime.prefix_reuse", "0.7"),
    _to(LLM, "normalize_log_probs", values.boolean, "options.normalize_log_probs", "0.8", default="true"),
    _to(LLM, "enable_chunked_context", values.boolean, "runtime.chunked_prefill", "0.8"),
    _to(LLM, "gpu_device_ids", values.devices, "runtime.devices", "0.8"),
    _refuse(LLM, "participant_ids", values.text, _ONE_HOST, "0.13"),
    _refuse(LLM, "num_nodes", values.whole, _ONE_HOST, "0.19", allowed=(1,)),
    _ignore(LLM, "lora_cache_optimal_adapter_size", values.whole, _NO_ADAPTERS, "0.9"),
    _ignore(LLM, "lora_cache_max_adapter_size", values.whole, _NO_ADAPTERS, "0.9"),
    _ignore(LLM, "lora_cache_gpu_memory_fraction", values.number, _NO_ADAPTERS, "0.9"),
    _ignore(LLM, "lora_cache_host_memory_bytes", values.whole, _NO_ADAPTERS, "0.9"),
    _refuse(LLM, "lora_prefetch_dir", values.text, "Stoker loads no adapters; remove the key.", "0.19"),
    _to(LLM, "decoding_mode", values.decoding(DECODING_MODES), "options.decoding_mode", "0.9"),
    _refuse(LLM, "medusa_choices", values.text, _NO_SPECULATION, "0.9"),
    _refuse(LLM, "eagle_choices", values.text, _NO_SPECULATION, "0.16"),
    _refuse(LLM, "lookahead_window_size", values.whole, _NO_SPECULATION, "0.19"),
    _refuse(LLM, "lookahead_ngram_size", values.whole, _NO_SPECULATION, "0.19"),
    _refuse(LLM, "lookahead_verification_set_size", values.whole, _NO_SPECULATION, "0.19"),
    _refuse(LLM, "speculative_decoding_fast_logits", values.boolean, "Stoker drafts no tokens; set false.", "0.15", allowed=(False,)),
    _to(LLM, "guided_decoding_backend", values.choice("xgrammar"), "guided_decoding_backend", "0.19", default="xgrammar"),
    _to(LLM, "tokenizer_dir", values.text, "tokenizer", "0.19"),
    _ignore(LLM, "xgrammar_tokenizer_info_path", values.text, "the grammar compiler reads the tokenizer itself", "0.19"),
    _ignore(LLM, "executor_worker_path", values.text, "Stoker starts its own workers", "0.10"),
    _ignore(
        LLM,
        "worker_path",
        values.text,
        "Stoker starts its own workers; later TensorRT-LLM refuses it",
        "0.9",
        until="0.9",
        warn=True,
    ),
    _refuse(LLM, "gpu_weights_percent", values.number, "Stoker keeps all weights on the device; set 1.0.", "0.10", allowed=(1.0,)),
    _ignore(LLM, "multi_block_mode", values.boolean, "attention splits a sequence when rows are few, by measurement", "0.12"),
    _ignore(LLM, "enable_context_fmha_fp32_acc", values.boolean, "attention always sums in float32", "0.12"),
    _to(LLM, "cuda_graph_mode", values.boolean, "runtime.cuda_graphs", "0.15"),
    _ignore(LLM, "cuda_graph_cache_size", values.whole, "one graph is kept for each bucket of batch sizes", "0.15"),
)

KEYS: dict[tuple[str, str], Key] = {(row.kind, row.name): row for row in _ROWS}


def names(kind: str) -> list[str]:
    return [name for of, name in KEYS if of == kind]
