"""Models with gated delta nets: qwen3next, qwen35 and qwen35moe. The converter adds 1 to the weights of norms."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture, ModuleNames
from stoker.builder.checkpoint.gguf.architectures.qwen import as_row
from stoker.builder.checkpoint.gguf.architectures.states import flat_log_of_decay, state_heads
from stoker.builder.checkpoint.gguf.config_fields import expert_config, llama_config, shared_expert_width
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Transformed
from stoker.models.architectures.qwen3_next import attention_gates, delta_net, queries_keys_values, ungroup_gates, ungroup_inputs

_INTERVAL = 4  # every fourth layer has attention unless the file says otherwise


def _read_delta_net(m: Metadata) -> dict[str, Any]:
    """The keys that all these models share. `ssm.state_size` is the size of keys, and `ssm.group_count` the number of their heads."""
    config = llama_config(m, partial_rotary=True)
    heads, size = state_heads(m)
    config["num_hidden_layers"] -= m.leave_out_last_blocks(m.get("nextn_predict_layers", int, 0))
    return (
        config
        | _kinds_of_layers(m, config["num_hidden_layers"])
        | {
            "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
            "full_attention_interval": m.get("full_attention_interval", int, _INTERVAL) or _INTERVAL,
            "linear_conv_kernel_dim": m.require("ssm.conv_kernel", int),
            "linear_key_head_dim": m.require("ssm.state_size", int),
            "linear_num_key_heads": m.require("ssm.group_count", int),
            "linear_num_value_heads": heads,
            "linear_value_head_dim": size,
            "attention_bias": any(m.has_tensor(f"blk.{i}.attn_q.bias") for i in range(config["num_hidden_layers"])),
        }
    )


def _kinds_of_layers(m: Metadata, layers: int) -> dict[str, Any]:
    """layer_types, if the file has the kind of each block, those of multi-token prediction included."""
    key = "attention.recurrent_layers"
    if (recurrent := m.get(key, [bool])) is None:
        return {}
    if len(recurrent) != m.require("block_count", int):
        raise m.unsupported(key, recurrent, "A boolean for each block is.")
    return {"layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]}


def _read_experts(m: Metadata) -> dict[str, Any]:
    """The experts of all layers, whose weights sum to 1."""
    m.require_value("expert_weights_scale", 0.0, 1.0)
    m.require_value("expert_weights_norm", True)
    return expert_config(m) | {"shared_expert_intermediate_size": shared_expert_width(m)}


def _read_qwen3_next(m: Metadata) -> dict[str, Any]:
    """Qwen3-Next."""
    return _read_delta_net(m) | _read_experts(m) | {"norm_topk_prob": True}


def _read_qwen3_5_moe(m: Metadata) -> dict[str, Any]:
    """Qwen3.5 with experts, and no MLPs."""
    config = _read_delta_net(m) | _read_experts(m)
    config.pop("intermediate_size", None)
    return config


_COMMON: dict[str, str | tuple[str, ...] | Transformed] = {
    "mlp_norm": "post_attention_norm",
    "attention.qkv": Transformed(("attn_q", "attn_k", "attn_v"), queries_keys_values, moves="rows"),
    "attention.gate": Transformed(("attn_q",), attention_gates, moves="rows"),
    "mlp.shared_gate": Transformed(("ffn_gate_inp_shexp",), as_row),
    "state.norm": "ssm_norm",
}


def _qwen3_next_names(tensors: Container[str]) -> ModuleNames:
    """The modules of Qwen3-Next. Early files have one input projection, whose rows are in groups of the heads of a key."""
    is_grouped = "blk.0.ssm_in.weight" in tensors
    return _COMMON | {
        "state.in": Transformed(("ssm_in",), ungroup_inputs, moves="rows") if is_grouped else ("attn_qkv", "attn_gate"),
        "state.gates": Transformed(("ssm_ba",), ungroup_gates, moves="rows"),
        "state.out": "ssm_out",
        "state.conv": "ssm_conv1d",
        "state.a_log": Transformed(("ssm_a",), flat_log_of_decay),
        "state.dt_bias": "ssm_dt.bias",
    }


def _value_heads(tensor: Tensor, config: ModelConfig, axis: int = 0) -> Tensor:
    """A tensor with the value heads of each key head side by side, from one in which the key heads alternate.

    `axis` has all value heads, each with the same number of features.
    """
    state = delta_net(config)
    shape = (state.num_heads // state.key_heads, state.key_heads, -1)
    rearranged: Tensor = tensor.unflatten(axis, shape).transpose(axis, axis + 1).flatten(axis, axis + 2)
    return rearranged


def _after_keys(tensor: Tensor, config: ModelConfig) -> Tensor:
    """`_value_heads` of the rows behind those of queries and keys."""
    state = delta_net(config)
    keys = 2 * state.key_heads * state.key_size
    return torch.cat((tensor[:keys], _value_heads(tensor[keys:], config)))


def _inputs(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of q, k, v and output gate."""
    return torch.cat((_after_keys(tensors[0], config), _value_heads(tensors[1], config)))


def _gates(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of beta and time step."""
    return torch.cat([_value_heads(tensor, config) for tensor in tensors])


def _decay(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """a_log [heads]."""
    return _value_heads(flat_log_of_decay(tensors, config), config)


def _rearranged(axis: int, tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """`_value_heads` of the only source."""
    return _value_heads(tensors[0], config, axis)


def _convolution(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of the convolution of q, k and v."""
    return _after_keys(tensors[0], config)


_QWEN3_5_NAMES = _COMMON | {
    "state.in": Transformed(("attn_qkv", "attn_gate"), _inputs, moves="rows"),
    "state.gates": Transformed(("ssm_beta", "ssm_alpha"), _gates, moves="rows"),
    "state.out": Transformed(("ssm_out",), partial(_rearranged, 1), moves="columns"),
    "state.conv": Transformed(("ssm_conv1d",), _convolution),
    "state.a_log": Transformed(("ssm_a",), _decay),
    "state.dt_bias": Transformed(("ssm_dt.bias",), partial(_rearranged, 0)),
}
ARCHITECTURES = (
    GGUFArchitecture(name="qwen3next", model_types=("qwen3_next",), read_config=_read_qwen3_next, names=_qwen3_next_names),
    GGUFArchitecture(
        name="qwen35",
        model_types=("qwen3_5_text", "qwen3_5"),
        read_config=_read_delta_net,
        names=lambda tensors: _QWEN3_5_NAMES,
    ),
    GGUFArchitecture(
        name="qwen35moe",
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        read_config=_read_qwen3_5_moe,
        names=lambda tensors: _QWEN3_5_NAMES,
    ),
)
