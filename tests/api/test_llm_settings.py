"""The keyword arguments of stoker.LLM: names of vLLM, types, and errors with the fix. No engine is loaded."""

from __future__ import annotations

import inspect
import re
import typing
from typing import Any

import pytest

from stoker import LLM, ConfigError, ConfigTypeError, LLMSettings
from stoker.api.settings import read_settings
from stoker.base.config import RuntimeConfig, RuntimeSettings
from stoker.deploy.build_settings import BuildSettings

VLLM = pytest.mark.compatibility(
    protocol="Python API", client="vllm.LLM", version="0.8 to 0.26", feature="every argument has its effect, or is refused with the fix"
)

# The arguments of vllm.LLM and those of EngineArgs that its users pass most, of vLLM 0.8 to 0.26.
OF_VLLM = [
    "runner", "convert", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "allowed_local_media_path",
    "allowed_media_domains", "tensor_parallel_size", "dtype", "quantization", "revision", "tokenizer_revision", "chat_template", "seed",
    "gpu_memory_utilization", "swap_space", "cpu_offload_gb", "enforce_eager", "max_seq_len_to_capture", "disable_custom_all_reduce",
    "hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config", "kv_cache_memory_bytes", "structured_outputs_config",
    "compilation_config", "logits_processors", "task", "download_dir", "load_format", "config_format", "max_model_len", "kv_cache_dtype",
    "pipeline_parallel_size", "distributed_executor_backend", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
    "enable_chunked_prefill", "block_size", "enable_expert_parallel", "data_parallel_size", "speculative_config", "enable_lora",
    "limit_mm_per_prompt", "guided_decoding_backend", "disable_log_stats", "max_logprobs", "served_model_name", "num_gpu_blocks_override",
    "kv_transfer_config", "calculate_kv_scales", "model_impl", "rope_scaling",
    "rope_theta", "hf_config_path", "disable_sliding_window", "override_pooler_config", "disable_async_output_proc", "worker_cls",
    "max_parallel_loading_workers",
]  # fmt: skip


def test_all_fields_of_the_run_are_arguments() -> None:
    assert typing.get_type_hints(RuntimeSettings) == typing.get_type_hints(RuntimeConfig)


def test_every_argument_is_documented_and_in_the_signature() -> None:
    documented = set(re.findall(r"^ {8}(\w+): ", LLMSettings.__doc__ or "", re.MULTILINE))
    assert documented == {*typing.get_type_hints(LLMSettings)} - {*typing.get_type_hints(RuntimeSettings)} | {"kv_cache_dtype"}
    parameters = inspect.signature(LLM).parameters
    assert parameters["policy"].default == RuntimeConfig().policy and parameters["max_model_len"].default is None
    assert [*parameters] == ["model", "tokenizer", "progress", *typing.get_type_hints(LLMSettings)]


@VLLM
@pytest.mark.parametrize(
    ("name", "value", "section", "field", "expected"),
    [
        ("max_num_seqs", 32, "runtime", "max_batch_size", 32),
        ("max_num_batched_tokens", 512, "runtime", "max_num_tokens", 512),
        ("enable_prefix_caching", False, "runtime", "prefix_reuse", False),
        ("enable_chunked_prefill", False, "runtime", "chunked_prefill", False),
        ("enforce_eager", True, "runtime", "cuda_graphs", False),
        ("disable_custom_all_reduce", True, "runtime", "custom_all_reduce", False),
        ("max_model_len", 4096, "build", "max_total_len", 4096),
        ("tensor_parallel_size", 2, "build", "tensor_parallel", 2),
        ("pipeline_parallel_size", 2, "build", "pipeline_parallel", 2),
        ("data_parallel_size", 2, "build", "data_parallel", 2),
        ("enable_expert_parallel", True, "build", "expert_parallel", True),
        ("dtype", "half", "build", "dtype", "float16"),
        ("dtype", "auto", "build", "dtype", None),
        ("dtype", "bfloat16", "build", "dtype", "bfloat16"),
        ("quantization", "fp8", "build", "quantization", "fp8"),
        ("kv_cache_dtype", "fp8", "build", "kv_cache_dtype", "float8_e4m3fn"),
        ("kv_cache_dtype", "auto", "build", "kv_cache_dtype", "auto"),
        ("trust_remote_code", True, "build", "trust_remote_code", True),
    ],
)
def test_names_of_vllm(name: str, value: Any, section: str, field: str, expected: Any) -> None:
    choices = read_settings({name: value})
    if section == "runtime":
        assert choices.runtime == {field: expected} and choices.build == BuildSettings()
    else:
        assert choices.runtime == {} and choices.build == BuildSettings(**{field: expected})


def test_other_arguments() -> None:
    choices = read_settings({"seed": 3, "revision": "main", "policy": "static", "devices": [0, 1], "max_batch_size": None})
    assert (choices.seed, choices.revision, choices.runtime) == (3, "main", {"policy": "static", "devices": (0, 1)})


@VLLM
@pytest.mark.parametrize("name", OF_VLLM)
def test_every_argument_of_vllm_is_accepted_or_refused_with_the_fix(name: str) -> None:
    """None means the default of vLLM, and therefore nothing."""
    read_settings({name: None})
    if name not in typing.get_type_hints(LLMSettings):
        with pytest.raises(ConfigError, match=rf"^{name}='something' is refused: LLM has no setting of this meaning\. [A-Z].*\.$"):
            read_settings({name: "something"})


@pytest.mark.parametrize("setting", [{"enable_lora": False}, {"cpu_offload_gb": 0}, {"load_format": "auto"}])
def test_values_that_request_nothing_are_accepted(setting: dict[str, Any]) -> None:
    assert read_settings(setting) == read_settings({})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_seqs": "8"}, r"max_num_seqs='8' is refused: it must be a whole number\."),
        ({"max_batch_size": 2.5}, r"max_batch_size=2\.5 is refused: it must be a whole number\."),
        ({"kv_cache_fraction": "0.5"}, r"kv_cache_fraction='0\.5' is refused: it must be a number\."),
        ({"enforce_eager": 1}, r"enforce_eager=1 is refused: it must be True or False\."),
        ({"devices": 0}, r"devices=0 is refused: it must be a list of whole numbers\."),
        ({"dtype": 16}, r"dtype=16 is refused: it must be a string\."),
        ({"max_modl_len": 5}, r"LLM has no argument 'max_modl_len'\. Did you mean max_model_len"),
        ({"zzzz": 5}, r"LLM has no argument 'zzzz'\. help\(stoker\.LLMSettings\) describes all arguments\."),
    ],
)
def test_wrong_types_and_names_are_type_errors(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message) as refused:
        read_settings(setting)
    assert isinstance(refused.value, ConfigTypeError)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_seqs": 0}, r"max_batch_size=0 is refused\. Use a whole number from 1"),
        ({"policy": "random"}, r"policy='random' is refused\. Use one of: "),
        ({"dtype": "int8"}, r"dtype='int8' is refused\. Use one of: float32"),
        ({"max_num_seqs": 4, "max_batch_size": 4}, r"max_num_seqs=4 is refused: it is another name of max_batch_size\. Leave one"),
        ({"gpu_memory_utilization": 0.9}, r"gpu_memory_utilization=0\.9 is refused: .* Set kv_cache_fraction"),
    ],
)
def test_wrong_values(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_settings(setting)
    assert not isinstance(refused.value, TypeError)
