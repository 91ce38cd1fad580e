"""Models whose embeddings, residuals, scores or logits are scaled: granite, granitemoe, minicpm, command-r and cohere2."""

from __future__ import annotations

import math
from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import (
    expert_config,
    layer_norm_config,
    layer_types,
    llama_config,
    shared_expert_width,
)
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.models.architecture import Transformed
from stoker.models.tensor_transforms import flatten


def read_granite(m: Metadata) -> dict[str, Any]:
    """The keys that all kinds of Granite share. Without attention.scale, scores are divided by the root of the head size."""
    config = llama_config(m)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "attention_multiplier": m.get("attention.scale", float, 0.0) or size**-0.5,
        "embedding_multiplier": m.get("embedding_scale", float, 0.0) or 1.0,
        "residual_multiplier": m.get("residual_scale", float, 0.0) or 1.0,
        "logits_scaling": m.get("logit_scale", float, 0.0) or 1.0,
        "attention_bias": m.has_bias("attn_q", "attn_qkv"),
        "mlp_bias": m.has_bias("ffn_up"),
    }


def _read_granite(m: Metadata) -> dict[str, Any]:
    """Granite 3, whose layers have rotary embeddings: rope.scaling.finetuned is the switch of them in llama.cpp."""
    m.require_value("rope.scaling.finetuned", True)
    return read_granite(m)


def _read_granite_moe(m: Metadata) -> dict[str, Any]:
    """Granite 3 MoE, optionally with a shared expert."""
    experts, shared = expert_config(m), shared_expert_width(m)
    sizes = {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
    if shared is not None:
        sizes |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return read_granite(m) | sizes | {"intermediate_size": experts["moe_intermediate_size"]}


def _read_minicpm(m: Metadata) -> dict[str, Any]:
    """MiniCPM. The defaults are those of MiniCPM 2B, whose first files have no scales."""
    config = llama_config(m)
    depth = m.get("residual_scale", float)
    logits = m.get("logit_scale", float)
    return config | {
        "scale_emb": m.get("embedding_scale", float, 12.0),
        "scale_depth": 1.4 if depth is None else depth * math.sqrt(m.require("block_count", int)),
        "dim_model_base": 256 if not logits else config["hidden_size"] / logits,
        "attention_bias": m.has_bias("attn_q", "attn_qkv"),
    }


def _read_command_r(m: Metadata) -> dict[str, Any]:
    """Command-R and R+."""
    config = layer_norm_config(m)
    config |= {"logit_scale": m.require("logit_scale", float), "attention_bias": m.has_bias("attn_q", "attn_qkv")}
    return config | {"use_qk_norm": m.has_tensor("blk.0.attn_q_norm.weight")}


def _read_cohere2(m: Metadata) -> dict[str, Any]:
    """Command-R7B and Command A."""
    config = layer_norm_config(m) | {"logit_scale": m.require("logit_scale", float)}
    config |= {"attention_bias": m.has_bias("attn_q", "attn_qkv"), "layer_types": layer_types(m, 4)}
    return config | {"sliding_window": m.require("attention.sliding_window", int)}


_PER_HEAD_NORMS = {
    "attention.q_norm": Transformed(("attn_q_norm",), flatten),
    "attention.k_norm": Transformed(("attn_k_norm",), flatten),
}
ARCHITECTURES = (
    GGUFArchitecture(name="granite", model_types=("granite",), read_config=read_granite, permuted=True),
    GGUFArchitecture(name="granitemoe", model_types=("granitemoe", "granitemoeshared"), read_config=_read_granite_moe, permuted=True),
    GGUFArchitecture(name="minicpm", model_types=("minicpm",), read_config=_read_minicpm, permuted=True),
    GGUFArchitecture(
        name="command-r",
        model_types=("cohere",),
        read_config=_read_command_r,
        names=lambda tensors: _PER_HEAD_NORMS,
    ),
    GGUFArchitecture(name="cohere2", model_types=("cohere2",), read_config=_read_cohere2),
)
