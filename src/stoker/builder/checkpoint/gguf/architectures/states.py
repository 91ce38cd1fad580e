"""Models with recurrent states: mamba (Mamba, Falcon Mamba), mamba2, jamba, falcon-h1 and granitehybrid.

The converter stores -exp(A_log) as `ssm_a`, and multiplies the weights of Falcon-H1 by its multipliers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture, ModuleNames
from stoker.builder.checkpoint.gguf.architectures.scaled import read_granite
from stoker.builder.checkpoint.gguf.config_fields import (
    RMS_EPSILON,
    expert_config,
    fraction,
    llama_config,
    shared_expert_width,
    vocabulary_config,
)
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Transformed
from stoker.models.tensor_transforms import flatten


def _log_of_decay(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """A_log from -exp(A_log), float32."""
    return tensors[0].float().neg().log()


def flat_log_of_decay(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """A_log [heads] from -exp(A_log) [heads, 1], float32."""
    return _log_of_decay(tensors, config).flatten()


_BLOCK: ModuleNames = {
    "state.in": "ssm_in",
    "state.out": "ssm_out",
    "state.conv": "ssm_conv1d",
    "state.dt_bias": "ssm_dt.bias",
}
_MAMBA1: ModuleNames = {
    **_BLOCK,
    "state.inputs": "ssm_x",
    "state.step": "ssm_dt",
    "state.a_log": Transformed(("ssm_a",), _log_of_decay),
    "state.skip": "ssm_d",
    "state.step_norm": "ssm_dt_norm",
    "state.b_norm": "ssm_b_norm",
    "state.c_norm": "ssm_c_norm",
}
MAMBA2_NAMES: ModuleNames = {
    **_BLOCK,
    "state.a_log": Transformed(("ssm_a",), flat_log_of_decay),
    "state.skip": Transformed(("ssm_d",), flatten),
    "state.norm": Transformed(("ssm_norm",), flatten),
}


def _state_only(m: Metadata) -> dict[str, Any]:
    """The keys of a model without attention and MLPs."""
    m.require_value("feed_forward_length", 0)
    m.require_value("attention.head_count", 0)
    return vocabulary_config(m) | {
        "hidden_size": m.require("embedding_length", int),
        "num_hidden_layers": m.require("block_count", int),
        "max_position_embeddings": m.require("context_length", int),
        "layer_norm_epsilon": m.require(RMS_EPSILON, float),
        "hidden_act": "silu",
        "state_size": m.require("ssm.state_size", int),
        "conv_kernel": m.require("ssm.conv_kernel", int),
        "use_bias": m.has_bias("ssm_in"),
        "use_conv_bias": m.has_bias("ssm_conv1d"),
    }


def _read_mamba(m: Metadata) -> dict[str, Any]:
    """Mamba, or Falcon Mamba if time step, B and C are normalized, for which the file has no other epsilon."""
    config = _state_only(m)
    config |= {"intermediate_size": m.require("ssm.inner_size", int), "time_step_rank": m.require("ssm.time_step_rank", int)}
    if not m.get("ssm.dt_b_c_rms", bool, False):
        return config
    return config | {"model_type": "falcon_mamba", "mixer_rms_eps": config["layer_norm_epsilon"]}


def _read_mamba2(m: Metadata) -> dict[str, Any]:
    """Mamba 2. The key time_step_rank has the number of heads."""
    config, (heads, size) = _state_only(m), state_heads(m)
    expand = _expansion(heads * size, config["hidden_size"])
    return config | {"num_heads": heads, "head_dim": size, "expand": expand, "n_groups": m.require("ssm.group_count", int)}


def _expansion(inner: int, hidden: int) -> float:
    """The ratio of the features of a block to the hidden size. transformers accepts a whole number only, if there is one."""
    return inner // hidden if inner % hidden == 0 else fraction(inner, hidden)


def state_heads(m: Metadata) -> tuple[int, int]:
    """(heads, features of a head) of Mamba 2 blocks. Raises CheckpointError if the heads do not divide the features."""
    heads, inner = m.require("ssm.time_step_rank", int), m.require("ssm.inner_size", int)
    if heads <= 0 or inner % heads:
        raise m.unsupported("ssm.time_step_rank", heads, f"A divisor of ssm.inner_size={inner} is.")
    return heads, inner // heads


def _read_jamba(m: Metadata) -> dict[str, Any]:
    """Jamba. Layers with attention have key-value heads, and layers with experts have a router.

    The converter counts the MLPs of a model without experts as one expert.
    """
    kv_heads, layers = _kv_heads(m), m.require("block_count", int)
    config = llama_config(m, rotary=False) | _num_kv_heads(m, kv_heads)
    hidden, inner = config["hidden_size"], m.require("ssm.inner_size", int)
    if inner % hidden:
        raise m.unsupported("ssm.inner_size", inner, f"A multiple of embedding_length={hidden} is.")
    attention = [i for i, heads in enumerate(kv_heads) if heads]
    experts = [i for i in range(layers) if m.has_tensor(f"blk.{i}.ffn_gate_inp.weight")]
    if not experts:
        m.require_value("expert_count", 0, 1)
        m.value("expert_used_count")  # has no effect
    return config | {
        **_period(m, "attn_layer", "attention.head_count_kv", attention, layers),
        **_period(m, "expert_layer", "expert_count", experts, layers),
        "num_experts": m.get("expert_count", int, 0) if experts else 1,
        "num_experts_per_tok": m.get("expert_used_count", int, 0) if experts else 1,
        "mamba_expand": inner // hidden,
        "mamba_d_state": m.require("ssm.state_size", int),
        "mamba_d_conv": m.require("ssm.conv_kernel", int),
        "mamba_dt_rank": m.require("ssm.time_step_rank", int),
        "mamba_conv_bias": _has_bias(m, "ssm_conv1d"),
        "mamba_proj_bias": _has_bias(m, "ssm_in"),
    }


def _kv_heads(m: Metadata) -> list[int]:
    """The number of key-value heads of each layer, 0 for a layer with a state. Raises CheckpointError for several numbers."""
    key, layers = "attention.head_count_kv", m.require("block_count", int)
    found = m.value(key)
    heads = [found] * layers if type(found) is int else found
    valid = isinstance(heads, list) and len(heads) == layers and all(type(count) is int and count >= 0 for count in heads)
    if not valid or len({*heads} - {0}) > 1:
        raise m.unsupported(key, found, f"An array of {layers} numbers is, each 0 or the same number of heads.")
    result: list[int] = heads
    return result


def _num_kv_heads(m: Metadata, heads: list[int]) -> dict[str, Any]:
    """The number of key-value heads, that of query heads if no layer has attention."""
    return {"num_key_value_heads": max(heads, default=0) or m.value("attention.head_count")}


def _has_bias(m: Metadata, module: str) -> bool:
    """Whether a module has a bias in the layers that have it."""
    return any(name.endswith(f".{module}.bias") for name in m.tensors)


def _period(m: Metadata, prefix: str, key: str, layers: Sequence[int], count: int) -> dict[str, int]:
    """The period and offset by which config.json names `layers`. Raises CheckpointError, naming `key`, if they have none."""
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else count + 1
    if [*range(first, count, period)] != [*layers] or first >= period:
        raise m.unsupported(
            key, f"layers {', '.join(map(str, layers))}", "Layers at regular distances are, the first one within the first."
        )
    return {f"{prefix}_period": period, f"{prefix}_offset": first}


def _read_falcon_h1(m: Metadata) -> dict[str, Any]:
    """Falcon-H1, whose multipliers are part of the weights."""
    heads, size = state_heads(m)
    return llama_config(m) | {
        "attention_bias": m.has_bias("attn_q", "attn_qkv"),
        "mlp_bias": m.has_bias("ffn_up"),
        "projectors_bias": m.has_bias("ssm_out"),
        "mamba_rms_norm": m.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_d_ssm": heads * size,
        **_mamba2_keys(m, heads, size),
    }


def _falcon_h1_names(tensors: Container[str]) -> ModuleNames:
    """The name of the norm before the MLP has no suffix, because of a fault in the converter's table of names."""
    return {**MAMBA2_NAMES, "mlp_norm.weight": "ffn_norm"} if "blk.0.ffn_norm" in tensors else MAMBA2_NAMES


def _mamba2_keys(m: Metadata, heads: int, size: int) -> dict[str, Any]:
    """The keys of Mamba 2 blocks in the config.json of Falcon-H1 and Granite 4."""
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": m.require("ssm.group_count", int),
        "mamba_d_state": m.require("ssm.state_size", int),
        "mamba_d_conv": m.require("ssm.conv_kernel", int),
        "mamba_conv_bias": _has_bias(m, "ssm_conv1d"),
        "mamba_proj_bias": _has_bias(m, "ssm_in"),
    }


def _read_granite_hybrid(m: Metadata) -> dict[str, Any]:
    """Granite 4. rope.scaling.finetuned states whether the attention layers have a rotary embedding."""
    kv_heads, (heads, size) = _kv_heads(m), state_heads(m)
    config = read_granite(m) | _num_kv_heads(m, kv_heads) | {"attention_bias": _has_bias(m, "attn_q")}
    shared, width = shared_expert_width(m), config["intermediate_size"]
    config |= {"num_local_experts": 0, "shared_intermediate_size": width}
    if m.get("expert_count", int, 0):
        experts = expert_config(m)
        config |= {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
        config |= {"intermediate_size": experts["moe_intermediate_size"], "shared_intermediate_size": shared}
    else:
        m.require_value("expert_used_count", 0)
    return config | {
        "position_embedding_type": "rope" if m.get("rope.scaling.finetuned", bool, True) else "nope",
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "mamba_expand": _expansion(heads * size, config["hidden_size"]),
        **_mamba2_keys(m, heads, size),
    }


ARCHITECTURES = (
    GGUFArchitecture(name="mamba", model_types=("mamba", "falcon_mamba"), read_config=_read_mamba, names=lambda tensors: _MAMBA1),
    GGUFArchitecture(name="mamba2", model_types=("mamba2",), read_config=_read_mamba2, names=lambda tensors: MAMBA2_NAMES),
    GGUFArchitecture(name="jamba", model_types=("jamba",), read_config=_read_jamba, names=lambda tensors: _MAMBA1),
    GGUFArchitecture(name="falcon-h1", model_types=("falcon_h1",), read_config=_read_falcon_h1, names=_falcon_h1_names),
    GGUFArchitecture(
        name="granitehybrid",
        model_types=("granitemoehybrid",),
        read_config=_read_granite_hybrid,
        names=lambda tensors: MAMBA2_NAMES,
        permuted=True,
    ),
)
