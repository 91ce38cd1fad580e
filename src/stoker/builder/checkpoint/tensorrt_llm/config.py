"""Converts the config.json of a TensorRT-LLM checkpoint to the data of a Hugging Face config.json."""

from __future__ import annotations

import fnmatch
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.tensorrt_llm.expert_keys import MIGRATION, check_size, expert_keys
from stoker.builder.checkpoint.tensorrt_llm.families.family import Family
from stoker.builder.checkpoint.tensorrt_llm.families.table import FAMILIES, UNSUPPORTED, family_of
from stoker.builder.checkpoint.tensorrt_llm.smoothquant import ALGORITHMS, MODELOPT_ALGORITHM

MAX_RANKS = 1024

# Key → the key of the Hugging Face config.json.
_RENAMED = {
    "hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads", "head_size": "head_dim", "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings", "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta", "mlp_bias": "mlp_bias", "dtype": "torch_dtype",
}  # fmt: skip

# Values of keys that change what the model computes; any other value is rejected.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope_gpt_neox", None),
    "hidden_act": ("silu", "swiglu"),
    "rotary_pct": (1.0, None), "residual_mlp": (False, None), "rmsnorm": (True, None), "lm_head_bias": (False, None),
    "use_logn_attn": (False, None), "embedding_multiplier": (1.0, None), "attention_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None), "output_multiplier_scale": (1.0, None), "fc_after_embed": (False, None),
    "use_input_layernorm_in_first_layer": (True, None), "use_last_layernorm": (True, None), "layer_idx_offset": (0, None),
    "disable_weight_only_quant_plugin": (False, None), "num_labels": (1, None), "sliding_window": (None,), "clip_qkv": (None,),
    "remove_duplicated_kv_heads": (False, None), "is_pruned": (False, None),
}  # fmt: skip

# Keys that are read elsewhere, are copies of others, or concern the runtime of TensorRT-LLM only.
_NO_EFFECT = (
    "architecture", "mapping", "quantization", "producer", "rank", "decoder", "logits_dtype", "bias", "attn_bias", "qk_layernorm",
    "use_parallel_embedding", "embedding_sharding_dim", "share_embedding_table", "tie_word_embeddings", "use_prompt_tuning", "kv_dtype",
    "runtime_defaults", "rotary_embedding_dim", "rotary_dim", "rotary_scaling", "moe", "moe_*", "world_size", "tp_size", "pp_size",
    "gpus_per_node", "seq_length", "qwen_type", "max_beam_width", "max_lora_rank", "builder", "version", "parallel_attention",
    "new_decoder_architecture", "pretrained_config", "tensor_parallel", "pipeline_parallel", "enable_pos_shift", "dense_context_fmha",
    "lora_target_modules", "hf_modules_to_trtllm_modules", "trtllm_modules_to_hf_modules",
)  # fmt: skip

# The numbers that TensorRT-LLM uses for `{"type": "llama3"}` without further keys.
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_tensorrt_llm_checkpoint(data: dict[str, Any]) -> bool:
    """Whether the data of a config.json describes a checkpoint of TensorRT-LLM."""
    has_hugging_face_keys = "architectures" in data or "model_type" in data
    return not has_hugging_face_keys and isinstance(data.get("architecture"), str) and ("mapping" in data or "producer" in data)


def hugging_face_config(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The equivalent Hugging Face config.json of a checkpoint in the directory `where`.

    Raises CheckpointError for an unsupported architecture, and for a key or a value that would change what the model computes.
    """
    architecture, family = data["architecture"], family_of(data)
    if family is None:
        listed = ", ".join(FAMILIES)
        reason = f": {UNSUPPORTED[architecture]}" if architecture in UNSUPPORTED else ""
        raise CheckpointError(
            f"{where}: TensorRT-LLM checkpoints of {architecture[:60]!r} are not supported{reason}.",
            cure=f"Supported: {listed}." if reason else f"Supported: {listed}. {MIGRATION}",
        )
    _check_keys(data, family, where)
    for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "hidden_size"):
        check_size(data, key, where)
    if not isinstance(data.get("moe"), dict | None):
        raise CheckpointError(f"{where}: moe={str(data['moe'])[:60]!r} is not an object.", cure="Correct config.json.")
    data = _with_defaults(data)
    config = {new: data[old] for old, new in (_RENAMED | dict(family.keys)).items() if new and data.get(old) is not None}
    config |= {"architectures": [family.architecture]} | ({"hidden_act": family.hidden_act} if family.hidden_act else {})
    config["tie_word_embeddings"] = bool(data.get("share_embedding_table") or data.get("tie_word_embeddings"))
    try:
        derived = family.derive(data)
    except (TypeError, ValueError, ArithmeticError) as problem:
        raise CheckpointError(f"{where}: a key has a value that is not a number: {problem}.", cure="Correct config.json.") from problem
    config |= dict(family.fixed) | {key: value for key, value in derived.items() if value is not None}
    if (scaling := data.get("rotary_scaling")) is not None:
        config["rope_scaling"] = _rope_scaling(scaling, where)
    if family.num_experts_key:
        config |= expert_keys(data, family, where)
    elif (data.get("moe") or {}).get("num_experts") or data.get("moe_num_experts"):
        raise CheckpointError(f"{where}: {architecture} with experts is not supported.", cure=MIGRATION)
    quantization = data.get("quantization")
    if not isinstance(quantization, dict | None):
        raise CheckpointError(f"{where}: quantization is not an object.", cure="Correct config.json.")
    if any((quantization or {}).get(key) for key in ("quant_algo", "kv_cache_quant_algo")):
        config["quantization_config"] = {"quant_method": "modelopt"} | dict(quantization or {})
        if (quantization or {}).get("quant_algo") == "W4A16_AWQ" and (quantization or {}).get("has_zero_point"):
            config["quantization_config"]["quant_algo"] = "W4A16_GPTQ"  # AWQ of Hugging Face is stored as GPTQ is
        if (quantization or {}).get("quant_algo") in ALGORITHMS:
            config["quantization_config"]["quant_algo"] = MODELOPT_ALGORITHM
    return config


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the defaults of TensorRT-LLM for keys that some converters do not write."""
    found = {"norm_epsilon": 1e-5} | {key: value for key, value in data.items() if value is not None}
    if "hidden_size" in found:
        found.setdefault("intermediate_size", 4 * found["hidden_size"])
    if "hidden_size" in found and "num_attention_heads" in found:
        found.setdefault("head_size", found["hidden_size"] // found["num_attention_heads"])
    return found


def _check_keys(data: dict[str, Any], family: Family, where: str) -> None:
    """Raise CheckpointError for a key that is not known, and for a value that is not supported."""
    required = _REQUIRED_VALUES | dict(family.values)
    known = {*_RENAMED, *required, *family.keys}
    for key, value in data.items():
        if required.get(key) and value not in required[key]:
            supported = " or ".join(repr(one) for one in required[key] if one is not None) or "null"
            raise CheckpointError(f"{where}: {key}={str(value)[:60]!r} is not supported, only {supported}.", cure=MIGRATION)
        if key not in known and not any(fnmatch.fnmatchcase(key, pattern) for pattern in _NO_EFFECT):
            raise CheckpointError(
                f"{where}: {key}={str(value)[:60]!r} is not known.", cure=f"Remove the key if it has no effect. {MIGRATION}"
            )


def _rope_scaling(scaling: Any, where: str) -> dict[str, Any]:
    """`rope_scaling` of the Hugging Face config. TensorRT-LLM has default numbers for llama3."""
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{where}: rotary_scaling={str(scaling)[:60]!r} is not an object.", cure="Correct config.json.")
    kind = scaling.get("rope_type", scaling.get("type"))
    return (_LLAMA3 if kind == "llama3" else {}) | scaling


def rank_counts(data: dict[str, Any], where: str) -> tuple[int, int]:
    """(tensor-parallel ranks, pipeline stages) of a checkpoint. Raises CheckpointError for other kinds of parallelism."""
    mapping = data.get("mapping", {})
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{where}: mapping is not an object.", cure="Correct config.json.")
    for key in ("cp_size", "moe_cluster_size", "attn_cp_size"):
        if mapping.get(key, 1) not in (1, -1):
            raise CheckpointError(f"{where}: mapping.{key}={str(mapping[key])[:60]!r} is not supported, only 1.", cure=MIGRATION)
    sizes = mapping.get("tp_size", 1), mapping.get("pp_size", 1)
    for key, size in zip(("tp_size", "pp_size"), sizes, strict=True):
        if type(size) is not int or not 1 <= size <= MAX_RANKS:
            raise CheckpointError(f"{where}: mapping.{key}={str(size)[:60]!r} is not from 1 to {MAX_RANKS}.", cure="Correct config.json.")
    return sizes
