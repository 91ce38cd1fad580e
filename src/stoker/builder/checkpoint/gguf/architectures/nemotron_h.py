"""nemotron_h and nemotron_h_moe: a block of the file is a Mamba 2 block, attention, an MLP, or experts."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.architectures.states import MAMBA2_NAMES, state_heads
from stoker.builder.checkpoint.gguf.config_fields import (
    RMS_EPSILON,
    expert_config,
    head_size,
    per_layer,
    shared_expert_width,
    vocabulary_config,
)
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import TensorNames, Transformed
from stoker.models.architectures.nemotron_h import first_blocks


def _read_nemotron_h(m: Metadata) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3 Nano. A block with key-value heads is attention, one with MLP features an MLP or experts."""
    kv_heads, widths, (heads, features) = per_layer(m, "attention.head_count_kv"), per_layer(m, "feed_forward_length"), state_heads(m)
    num_blocks = m.require("block_count", int) - m.leave_out_last_blocks(m.get("nextn_predict_layers", int, 0))
    kinds = [_kind(m, i, kv_heads[i], widths[i]) for i in range(num_blocks)]
    config: dict[str, Any] = vocabulary_config(m) | {
        "hidden_size": m.require("embedding_length", int),
        "max_position_embeddings": m.require("context_length", int),
        "layer_norm_epsilon": m.require(RMS_EPSILON, float),
        "layers_block_type": kinds,
        "num_attention_heads": m.require("attention.head_count", int),
        "num_key_value_heads": max(kv_heads[:num_blocks]) or 1,
        "mamba_num_heads": heads,
        "mamba_head_dim": features,
        "n_groups": m.get("ssm.group_count", int, 1),
        "ssm_state_size": m.require("ssm.state_size", int),
        "conv_kernel": m.require("ssm.conv_kernel", int),
        "time_step_min": 0.0,  # llama.cpp has no bound
        "use_bias": any(m.has_tensor(f"blk.{i}.ssm_in.bias") for i in range(num_blocks)),
        "use_conv_bias": any(m.has_tensor(f"blk.{i}.ssm_conv1d.bias") for i in range(num_blocks)),
        "mlp_bias": any(m.has_tensor(f"blk.{i}.ffn_up.bias") for i in range(num_blocks)),
    }
    size = m.value("attention.key_length", head_size(config))
    m.require_value("attention.value_length", size)
    dense = [width for kind, width in zip(kinds, widths, strict=False) if kind == "mlp"]
    return config | {"head_dim": size, "intermediate_size": max(dense, default=1)} | _nemotron_experts(m)


def _kind(m: Metadata, block: int, kv_heads: int, width: int) -> str:
    """The kind of a block of Nemotron-H, as config.json calls it."""
    if kv_heads:
        return "attention"
    if not width:
        return "mamba"
    return "moe" if m.has_tensor(f"blk.{block}.ffn_gate_inp.weight") else "mlp"


def _nemotron_experts(m: Metadata) -> dict[str, Any]:
    """The keys of routed and shared experts; empty without experts."""
    if not m.get("expert_count", int, 0):
        return {}
    experts, shared = expert_config(m), shared_expert_width(m)
    m.value("expert_shared_count")  # the shared experts are one MLP of expert_shared_feed_forward_length features
    groups = m.get("expert_group_count", int, 1)
    return {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
        "norm_topk_prob": m.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": m.get("expert_weights_scale", float, 1.0) or 1.0,
        "n_group": groups,
        "topk_group": m.get("expert_group_used_count", int, 1),
    }


def _nemotron_names(config: ModelConfig) -> TensorNames:
    """The modules of all layers. A layer is one block, or two if an MLP or experts follow it."""
    names: TensorNames = {}
    for i, first in first_blocks(config):
        layer, mixer, mlp = f"layers.{i}", f"blk.{first}", f"blk.{first + 1}"
        names |= {f"{layer}.{key}": _of_block(mixer, source) for key, source in MAMBA2_NAMES.items()}
        names |= {
            f"{layer}.attention_norm": f"{mixer}.attn_norm",
            f"{layer}.attention.qkv": tuple(f"{mixer}.attn_{kind}" for kind in "qkv"),
            f"{layer}.attention.out": f"{mixer}.attn_output",
            f"{layer}.mlp_norm": f"{mlp}.attn_norm",
            f"{layer}.mlp.up": f"{mlp}.ffn_up",
            f"{layer}.mlp.down": f"{mlp}.ffn_down",
            f"{layer}.mlp.router": f"{mlp}.ffn_gate_inp",
            f"{layer}.mlp.correction": f"{mlp}.exp_probs_b.bias",
            f"{layer}.mlp.experts.up": f"{mlp}.ffn_up_exps.{{e}}",
            f"{layer}.mlp.experts.down": f"{mlp}.ffn_down_exps.{{e}}",
            f"{layer}.mlp.shared.up": f"{mlp}.ffn_up_shexp",
            f"{layer}.mlp.shared.down": f"{mlp}.ffn_down_shexp",
        }
    return names


def _of_block(block: str, source: str | tuple[str, ...] | Transformed) -> str | Transformed:
    """A module of `MAMBA2_NAMES` with its block."""
    if isinstance(source, Transformed):
        return Transformed(tuple(f"{block}.{name}" for name in source.sources), source.transform)
    return f"{block}.{source}"


_UNUSED_ROPE = ("rope.*",)  # attention has no rotary embedding
ARCHITECTURES = (
    GGUFArchitecture(
        name="nemotron_h",
        model_types=("nemotron_h",),
        read_config=_read_nemotron_h,
        model_names=_nemotron_names,
        ignored_keys=_UNUSED_ROPE,
    ),
    GGUFArchitecture(
        name="nemotron_h_moe",
        model_types=("nemotron_h",),
        read_config=_read_nemotron_h,
        model_names=_nemotron_names,
        ignored_keys=_UNUSED_ROPE,
    ),
)
