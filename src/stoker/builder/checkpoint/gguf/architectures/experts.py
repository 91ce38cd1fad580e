"""Mixtures of experts with a file of their own kind: gpt-oss, ernie4_5-moe and minimax-m2."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import expert_config, layer_types, llama_config, shared_expert_width
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.models.architecture import Transformed
from stoker.models.tensor_transforms import flatten


def _read_gpt_oss(m: Metadata) -> dict[str, Any]:
    """gpt-oss. The converter separates gates and ups, and llama.cpp has the limits of the activation as constants."""
    config, experts = llama_config(m), expert_config(m)
    config["intermediate_size"] = experts["moe_intermediate_size"]
    config |= {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
    if (scaling := config.pop("rope_scaling", None)) is not None:
        config["rope_scaling"] = scaling | {"truncate": False}
    return config | {
        "sliding_window": m.require("attention.sliding_window", int),
        "layer_types": layer_types(m, 2),
        "attention_bias": m.has_bias("attn_q", "attn_qkv"),
        "rope_parameters": None,
    }


def _read_ernie_moe(m: Metadata) -> dict[str, Any]:
    """ERNIE 4.5 MoE. The layers with experts are those that have a router."""
    config, experts, layers = llama_config(m), expert_config(m), m.require("block_count", int)
    width, shared = experts["moe_intermediate_size"], shared_expert_width(m) or 0
    last = max((i for i in range(min(layers, len(m.tensors))) if m.has_tensor(f"blk.{i}.ffn_gate_inp.weight")), default=layers - 1)
    m.value("expert_shared_count")
    return config | {
        "moe_num_experts": experts["num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared // width if width else 0,
        "moe_layer_start_index": m.get("leading_dense_block_count", int, 1),
        "moe_layer_end_index": last,
        "moe_layer_interval": m.get("interleave_moe_layer_step", int, 1),
    }


def _read_minimax_m2(m: Metadata) -> dict[str, Any]:
    """MiniMax M2. The first features of each head are rotated."""
    config, experts = llama_config(m, partial_rotary=True), expert_config(m)
    m.require_value("expert_gating_func", 2, 0)
    m.require_value("expert_weights_scale", 1.0, 0.0)
    factor = config.pop("partial_rotary_factor", 1.0)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "head_dim": size,
        "rotary_dim": int(size * factor),
        "intermediate_size": experts["moe_intermediate_size"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
    }


ARCHITECTURES = (
    GGUFArchitecture(
        name="gpt-oss",
        model_types=("gpt_oss",),
        read_config=_read_gpt_oss,
        names=lambda tensors: {"mlp_norm": "post_attention_norm"},
    ),
    GGUFArchitecture(
        name="ernie4_5-moe",
        model_types=("ernie4_5_moe",),
        read_config=_read_ernie_moe,
        names=lambda tensors: {"mlp.correction": Transformed(("exp_probs_b.bias",), flatten)},  # [1, experts], as in its checkpoints
    ),
    GGUFArchitecture(name="minimax-m2", model_types=("minimax_m2",), read_config=_read_minimax_m2),
)
