"""qwen, qwen2, qwen3, their mixtures of experts, and the text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import expert_config, llama_config, shared_expert_width
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Transformed

# Qwen's config.json lists a window that its models do not use.
_UNUSED_WINDOW = ("attention.sliding_window",)


def _read_qwen(m: Metadata) -> dict[str, Any]:
    """Qwen 1. llama.cpp evaluates it within the trained length only, where its NTK scaling and log-n attention have no effect."""
    config = llama_config(m)
    size = config.pop("head_dim", None) or config["hidden_size"] // config["num_attention_heads"]
    config |= {"layer_norm_epsilon": config.pop("rms_norm_eps", 1e-6), "rotary_emb_base": config.pop("rope_theta", 10000.0)}
    return config | {"kv_channels": size, "use_dynamic_ntk": False, "use_logn_attn": False, "no_bias": True}


def _read_qwen2_moe(m: Metadata) -> dict[str, Any]:
    """Qwen 1.5 MoE and Qwen 2 MoE."""
    m.require_value("expert_weights_scale", 0.0, 1.0)
    config = llama_config(m) | expert_config(m) | {"shared_expert_intermediate_size": shared_expert_width(m)}
    return config | {"norm_topk_prob": m.get("expert_weights_norm", bool, False), "qkv_bias": m.has_bias("attn_q", "attn_qkv")}


def _read_qwen3(m: Metadata) -> dict[str, Any]:
    """Qwen 3, dense."""
    return llama_config(m) | {"attention_bias": m.has_bias("attn_q", "attn_qkv")}


def _read_qwen3_moe(m: Metadata) -> dict[str, Any]:
    """Qwen 3 MoE, whose weights of chosen experts sum to 1 unless the file says otherwise."""
    m.require_value("expert_weights_scale", 0.0, 1.0)
    return _read_qwen3(m) | expert_config(m) | {"norm_topk_prob": m.get("expert_weights_norm", bool, True)}


def _read_qwen3_vl_moe(m: Metadata) -> dict[str, Any]:
    """Qwen3-VL with experts, whose weights sum to 1."""
    m.require_value("expert_weights_norm", True)
    return _read_qwen3_moe(m)


def as_row(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The weight [1, hidden] of a gate, which a file may store as a vector."""
    return tensors[0].reshape(1, -1)


ARCHITECTURES = (
    GGUFArchitecture(name="qwen", model_types=("qwen",), read_config=_read_qwen),
    GGUFArchitecture(name="qwen2", model_types=("qwen2",), read_config=llama_config, ignored_keys=_UNUSED_WINDOW),
    GGUFArchitecture(
        name="qwen2moe",
        model_types=("qwen2_moe",),
        read_config=_read_qwen2_moe,
        names=lambda tensors: {"mlp.shared_gate": Transformed(("ffn_gate_inp_shexp",), as_row)},
        ignored_keys=_UNUSED_WINDOW,
    ),
    GGUFArchitecture(name="qwen3", model_types=("qwen3",), read_config=_read_qwen3, ignored_keys=_UNUSED_WINDOW),
    GGUFArchitecture(name="qwen3moe", model_types=("qwen3_moe",), read_config=_read_qwen3_moe, ignored_keys=_UNUSED_WINDOW),
    GGUFArchitecture(
        name="qwen2vl",
        model_types=("qwen2_5_vl",),
        read_config=llama_config,
        ignored_keys=_UNUSED_WINDOW,
    ),
    GGUFArchitecture(
        name="qwen3vl",
        model_types=("qwen3_vl",),
        read_config=_read_qwen3,
        ignored_keys=("n_deepstack_layers",),
    ),
    GGUFArchitecture(
        name="qwen3vlmoe",
        model_types=("qwen3_vl_moe",),
        read_config=_read_qwen3_vl_moe,
        ignored_keys=("n_deepstack_layers",),
    ),
)
