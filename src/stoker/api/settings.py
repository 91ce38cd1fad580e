"""The keyword arguments of `stoker.LLM`: settings of the run, settings of the build, and the names that vLLM has for them."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig, RuntimeSettings, typed_value
from stoker.base.errors import ConfigError, ConfigTypeError
from stoker.base.registry import nearest
from stoker.deploy.build_settings import BuildSettings


class LLMSettings(RuntimeSettings, total=False):
    """The keyword arguments of `LLM`. All are optional, and None means the default.

    The fields of RuntimeConfig are settings of the run. Some have a second name, that of vLLM. Settings of the build determine the engine
    that is built from a checkpoint. If the model is an engine, they must be those that it was built with; lengths may also be lower.

    Attributes:
        dtype: Build: float16, bfloat16 or float32 for activations and unquantized weights, or auto.
        quantization: Build: a quantization such as FP8, AWQ or INT8, in any case. Checkpoints that are quantized already are read as
            they are, with or without the name of their method.
        kv_cache_dtype: Build: auto, int8 or fp8 (float8_e4m3fn). auto stores keys and values in `dtype`.
        max_model_len: Build: prompt and new tokens of a request together.
        max_input_len: Build: prompt tokens of a request.
        max_output_len: Build: new tokens of a request.
        max_beam_width: Build: beams of a request.
        tensor_parallel_size: Build: number of devices that share each layer.
        pipeline_parallel_size: Build: number of devices over which the layers are distributed.
        data_parallel_size: Build: number of devices with their own sequences and complete attention weights; requires
            `enable_expert_parallel`. Several replicas of another model are several servers.
        enable_expert_parallel: Build: whether each device has whole experts instead of a slice of every expert.
        trust_remote_code: Build: whether Python code of the checkpoint may run.
        revision: Branch, tag or commit of a hub id.
        seed: Seed of all requests without a seed of their own: the same calls give the same tokens. Default: random.
        max_num_seqs: The same as `max_batch_size`.
        max_num_batched_tokens: The same as `max_num_tokens`.
        enable_prefix_caching: The same as `prefix_reuse`.
        enable_chunked_prefill: The same as `chunked_prefill`.
        enforce_eager: The opposite of `cuda_graphs`.
        disable_custom_all_reduce: The opposite of `custom_all_reduce`.
    """

    dtype: str | None
    quantization: str | None
    max_model_len: int | None
    max_input_len: int | None
    max_output_len: int | None
    max_beam_width: int | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    enable_expert_parallel: bool | None
    trust_remote_code: bool | None
    revision: str | None
    seed: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool | None
    enable_chunked_prefill: bool | None
    enforce_eager: bool | None
    disable_custom_all_reduce: bool | None


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one LLM in Stoker's terms."""

    runtime: dict[str, Any]  # the fields of RuntimeConfig that are set
    build: BuildSettings
    revision: str | None = None
    seed: int | None = None


# vLLM's name → field of RuntimeConfig, and whether it has the opposite value.
_RUNTIME_NAMES = {
    "max_num_seqs": ("max_batch_size", False),
    "max_num_batched_tokens": ("max_num_tokens", False),
    "enable_prefix_caching": ("prefix_reuse", False),
    "enable_chunked_prefill": ("chunked_prefill", False),
    "enforce_eager": ("cuda_graphs", True),
    "disable_custom_all_reduce": ("custom_all_reduce", True),
}
_BUILD_NAMES = {
    "max_model_len": "max_total_len",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel",
    "enable_expert_parallel": "expert_parallel",
}
_DTYPES = {"auto": None, "half": "float16", "float": "float32"}
_KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
# Arguments of vLLM with another meaning, or without an equivalent: values that request nothing, and what to do instead of others.
_OF_VLLM: dict[str, tuple[tuple[Any, ...], str]] = {
    "gpu_memory_utilization": ((), "Set kv_cache_fraction, which is a fraction of the memory that weights and activations leave free."),
    "kv_cache_memory_bytes": ((), "Set kv_cache_tokens."),
    "block_size": ((), "Build the engine with --tokens-per-block."),
    "swap_space": ((0,), "Preempted sequences are computed again, and need no memory of the host."),
    "cpu_offload_gb": ((0,), "Use a quantization or more devices."),
    "hf_token": ((), "Set the environment variable HF_TOKEN."),
    "download_dir": ((), "Set the environment variables STOKER_CACHE and HF_HOME."),
    "load_format": (("auto", "safetensors"), "The format of the files is recognized."),
    "tokenizer_mode": (("auto",), "The tokenizer of the checkpoint is converted when the engine is built."),
    "tokenizer_revision": ((), "Name the directory of a tokenizer."),
    "skip_tokenizer_init": ((False,), "Send token ids, and ignore the text of the results."),
    "hf_overrides": (({},), "Change config.json of the checkpoint."),
    "rope_scaling": ((), "Change config.json of the checkpoint."),
    "rope_theta": ((), "Change config.json of the checkpoint."),
    "hf_config_path": ((), "Use a checkpoint with a config.json."),
    "disable_sliding_window": ((False,), "Change config.json of the checkpoint."),
    "max_seq_len_to_capture": ((), "CUDA graphs do not depend on the length. Set cuda_graphs=False to run without them."),
    "max_logprobs": ((), "Requests may have up to 20."),
    "speculative_config": ((), 'Set speculate="ngram", or the directory of a draft model or of heads; draft_tokens; and draft_tree.'),
    "enable_lora": ((False,), "Merge the adapter into the checkpoint."),
    "limit_mm_per_prompt": (({},), "Models read text only."),
    "distributed_executor_backend": (("mp", "uni"), "Ranks are processes of this machine."),
    "guided_decoding_backend": (("auto", "xgrammar"), "All grammars are compiled by xgrammar."),
    "structured_outputs_config": ((), "All grammars are compiled by xgrammar."),
    "compilation_config": ((), "Kernels are compiled when the engine is built."),
    "disable_async_output_proc": ((False,), "Set overlap=False to compute one step at a time."),
    "worker_cls": (("auto",), "Ranks are processes of this machine."),
    "max_parallel_loading_workers": ((), "Weights are mapped from the files of the engine."),
    "disable_log_stats": ((True,), "Call LLM.stats()."),
    "task": (("auto", "generate"), "Models generate text only."),
    "runner": (("auto", "generate"), "Models generate text only."),
    "convert": (("auto", "none"), "Models generate text only."),
    "override_pooler_config": ((), "Models generate text only."),
    "pooler_config": ((), "Models generate text only."),
    "mm_processor_kwargs": (({},), "Models read text only."),
    "allowed_local_media_path": (("",), "Models read text only."),
    "allowed_media_domains": (([],), "Models read text only."),
    "logits_processors": (([],), "Use the fields of SamplingParams."),
    "chat_template": ((), "Write it to chat_template.jinja of the checkpoint."),
    "config_format": (("auto", "hf"), "Use a checkpoint with a config.json."),
    "ignore_patterns": ((), "Files that a build does not need are not downloaded."),
    "max_context_len_to_capture": ((), "CUDA graphs do not depend on the length."),
    "num_gpu_blocks_override": ((), "Set kv_cache_tokens."),
    "kv_transfer_config": ((), "KV blocks are not sent to other servers."),
    "calculate_kv_scales": ((False,), "Scales are calibrated when the engine is built."),
    "model_impl": (("auto", "vllm"), "Models run in Stoker's own implementation."),
    "served_model_name": ((), "Use stoker serve --model-name."),
}


def read_settings(settings: Mapping[str, Any]) -> Choices:
    """The keyword arguments of LLM. Raises ConfigTypeError for a wrong name or type, ConfigError for a value that is not supported."""
    types = typing.get_type_hints(LLMSettings)
    for name, value in settings.items():
        if name not in types:
            _refuse(name, value, list(types))
    given = {name: typed_value(name, value, types[name]) for name, value in settings.items() if name in types and value is not None}
    runtime = {name: given[name] for name in RuntimeConfig.__struct_fields__ if name in given and name != "kv_cache_dtype"}
    for name, (field, opposite) in _RUNTIME_NAMES.items():
        if name in given:
            _check_single(name, field, given)
            runtime[field] = not given[name] if opposite else given[name]
    RuntimeConfig(**runtime)  # raises for a value out of range
    return Choices(runtime=runtime, build=_build_settings(given), revision=given.get("revision"), seed=given.get("seed"))


def _build_settings(given: dict[str, Any]) -> BuildSettings:
    """The settings of the build among the keyword arguments `given`, under Stoker's names."""
    fields = {name: given[name] for name in BuildSettings.__struct_fields__ if name in given}
    fields |= {field: given[name] for name, field in _BUILD_NAMES.items() if name in given}
    if "dtype" in fields:
        fields["dtype"] = _DTYPES.get(fields["dtype"], fields["dtype"])
    if "kv_cache_dtype" in fields:
        fields["kv_cache_dtype"] = _KV_DTYPES.get(fields["kv_cache_dtype"], fields["kv_cache_dtype"])
    return BuildSettings(**fields)


def _check_single(name: str, field: str, given: dict[str, Any]) -> None:
    if field in given:
        raise ConfigError(f"{name}={given[name]!r} is refused: it is another name of {field}.", cure="Leave one of them out.")


def _refuse(name: str, value: Any, known: list[str]) -> None:
    """Raise for a name that LLM does not have, unless it is one of vLLM's with a value that requests nothing."""
    if name not in _OF_VLLM:
        near = nearest(name, known)
        cure = f"Did you mean {' or '.join(near)}?" if near else "help(stoker.LLMSettings) describes all arguments."
        raise ConfigTypeError(f"LLM has no argument {name!r}.", cure=cure)
    harmless, cure = _OF_VLLM[name]
    if value is not None and value not in harmless:
        raise ConfigError(f"{name}={value!r} is refused: LLM has no setting of this meaning.", cure=cure)
