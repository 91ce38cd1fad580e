"""Hugging Face keys that are computed from several keys of a config.json of TensorRT-LLM."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.tensorrt_llm.tensors import Data


def neox_keys(data: Data) -> dict[str, Any]:
    """The rotary keys of GPT-NeoX, in the names of either converter."""
    return {
        "rotary_emb_base": data.get("rotary_emb_base", data.get("rotary_base", 10000)),
        "rotary_pct": data.get("rotary_pct", 1.0),
    }


def falcon_keys(data: Data) -> dict[str, Any]:
    """The block of Falcon: positions, biases, and which of its three forms of attention."""
    heads, kv_heads = data.get("num_attention_heads"), data.get("num_key_value_heads")
    return {
        "alibi": data.get("position_embedding_type") == "alibi_with_scale",
        "bias": bool(data.get("bias")),
        "parallel_attn": bool(data.get("parallel_attention")),
        "new_decoder_architecture": bool(data.get("new_decoder_architecture")),
        "multi_query": kv_heads == 1 and heads != 1,
    }


def mpt_keys(data: Data) -> dict[str, Any]:
    """The sizes and the attn_config of MPT."""
    inner, hidden = data.get("intermediate_size"), data.get("hidden_size")
    ratio = inner // hidden if isinstance(inner, int) and isinstance(hidden, int) and hidden > 0 and inner % hidden == 0 else 4
    attention = {"alibi": True, "clip_qkv": data.get("clip_qkv"), "alibi_bias_max": data.get("alibi_bias_max", 8)}
    return {"expansion_ratio": ratio, "attn_config": attention, "max_seq_len": data.get("max_position_embeddings") or 2048}


def phi_keys(data: Data) -> dict[str, Any]:
    """Phi, of which the first converter wrote the Hugging Face keys."""
    return {"partial_rotary_factor": data.get("rotary_pct", data.get("partial_rotary_factor", 1.0))}


def phi3_keys(data: Data) -> dict[str, Any]:
    """The rotary keys of Phi-3, with the divisors of longrope."""
    found: dict[str, Any] = {"partial_rotary_factor": data.get("rotary_pct") or 1.0}
    if data.get("position_embedding_type") == "long_rope":
        factors = {kind: data.get(f"longrope_scaling_{kind}_factors") for kind in ("short", "long")}
        found["rope_scaling"] = {"type": "longrope"} | {f"{kind}_factor": values for kind, values in factors.items()}
        found["original_max_position_embeddings"] = data.get("original_max_position_embeddings")
    return found


def granite_keys(data: Data) -> dict[str, Any]:
    """Granite: TensorRT-LLM multiplies the scale of attention by the root of the head size, and divides logits by a factor."""
    heads, hidden = data.get("num_attention_heads") or 1, data.get("hidden_size") or 1
    size = data.get("head_size") or hidden // heads
    attention, logits = data.get("attention_multiplier") or 1.0, data.get("output_multiplier_scale") or 1.0
    return {
        "attention_multiplier": attention / size**0.5 if attention != 1.0 else 1.0,
        "logits_scaling": 1 / logits,
        "embedding_multiplier": data.get("embedding_multiplier") or 1.0,
        "residual_multiplier": data.get("residual_multiplier") or 1.0,
        "attention_bias": bool(data.get("attn_bias")),
    }


def phimoe_keys(data: Data) -> dict[str, Any]:
    """Phi-3.5-MoE: the rotary keys, with factors of cosines and sines, and biases of attention and the head."""
    found = phi3_keys(data) | {"attention_bias": bool(data.get("attention_bias", True)), "lm_head_bias": True}
    found.pop("partial_rotary_factor")
    if "rope_scaling" in found:
        found["rope_scaling"] |= {f"{kind}_mscale": data.get(f"longrope_{kind}_mscale") for kind in ("short", "long")}
        found["rope_scaling"]["original_max_position_embeddings"] = data.get("original_max_position_embeddings")
    return found


def deepseek2_keys(data: Data) -> dict[str, Any]:
    """The routing of DeepSeek V2: groups of experts, and the factor of their outputs."""
    moe = data.get("moe") or {}
    limited = moe.get("normalization_mode") in (3, 4)
    return {
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "norm_topk_prob": moe.get("normalization_mode") in (1, 4),
        **_groups(moe),
    }


def deepseek3_keys(data: Data) -> dict[str, Any]:
    """The routing of DeepSeek V3, which TensorRT-LLM always normalizes."""
    return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, **_groups(data.get("moe") or {})}


def _groups(moe: Data) -> dict[str, Any]:
    """The groups of experts, and the factor of their outputs."""
    return {
        "n_group": moe.get("device_limited_n_group"),
        "topk_group": moe.get("device_limited_topk_group"),
        "routed_scaling_factor": moe.get("device_limited_routed_scaling_factor", 1.0),
    }


def mamba2_keys(data: Data) -> dict[str, Any]:
    """The heads of Mamba 2."""
    inner, size = data.get("rnn_hidden_size") or 0, data.get("rnn_head_size") or 1
    return {"num_heads": inner // size, "head_dim": size, "n_groups": data.get("ngroups"), "expand": inner / (data.get("hidden_size") or 1)}


def glm_keys(data: Data) -> dict[str, Any]:
    return {"partial_rotary_factor": data.get("rotary_pct") or 0.5, "attention_bias": bool(data.get("add_qkv_bias", True))}


def baichuan_keys(data: Data) -> dict[str, Any]:
    """Baichuan 2 has a key that Baichuan 1 has not, and 13B models have their length under another one."""
    found: dict[str, Any] = {"z_loss_weight": 0} if str(data.get("model_version")).startswith("v2") else {}
    is_alibi = data.get("position_embedding_type") == "alibi"
    return found | {"model_max_length" if is_alibi else "max_position_embeddings": data.get("max_position_embeddings")}


def gemma3_keys(data: Data) -> dict[str, Any]:
    return {"rope_theta": data.get("rotary_base") or 1e6, "rope_local_base_freq": data.get("rope_local_base_freq") or 10000.0}
