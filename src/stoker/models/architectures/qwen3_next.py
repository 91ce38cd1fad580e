"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and experts in all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.core.model_config import DeltaNetConfig, MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config
from stoker.models.architectures.qwen2 import qwen2_moe_names, with_experts
from stoker.models.config_fields import read_activation, read_layer_types, read_rope, replace_fields, require_values, with_defaults
from stoker.models.config_values import COUNT
from stoker.models.tensor_transforms import add_one, squeeze_conv, subtract_one, unsqueeze_conv


@with_defaults(
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2,
    head_dim=256, max_position_embeddings=32768, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, full_attention_interval=4, decoder_sparse_step=1, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts_per_tok=10, num_experts=512, norm_topk_prob=True,
)  # fmt: skip
def qwen3_next_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen3-Next checkpoint, from `hf`, the data of its config.json."""
    config = with_delta_nets(hf, "Qwen3NextForCausalLM")
    if not hf["num_experts"]:
        return config
    shared = MLPConfig(size=hf["shared_expert_intermediate_size"], activation=read_activation(hf))
    return with_experts(config, hf, num_experts=hf["num_experts"], shared=shared, shared_gate=True)


def with_delta_nets(hf: dict[str, Any], architecture: str) -> ModelConfig:
    """Llama with gated attention in the layers that layer_types lists as full_attention, and delta nets in the others."""
    require_values(hf, attn_output_gate=True, use_sliding_window=False)
    norm = NormConfig(eps=hf.get("rms_norm_eps", 1e-6), wide=True)
    rope = read_rope(hf, dim=hf["head_dim"], partial=0.25)
    config = llama_config(hf, architecture=architecture, qk_norm=norm, out_gate=True, rope=rope)
    state = DeltaNetConfig(
        num_heads=hf["linear_num_value_heads"],
        key_heads=hf["linear_num_key_heads"],
        key_size=hf["linear_key_head_dim"],
        value_size=hf["linear_value_head_dim"],
        kernel=hf["linear_conv_kernel_dim"],
        norm=NormConfig(eps=norm.eps),
        activation=read_activation(hf),
    )
    step = hf["full_attention_interval"]
    default = ["linear_attention" if (i + 1) % step else "full_attention" for i in range(config.num_layers)]
    kinds = read_layer_types(hf, default, ("linear_attention", "full_attention"))
    linear = {"attention": None, "state": state, "norm": norm}
    return replace_fields(config, layer=lambda i: linear if kinds[i] == "linear_attention" else {"norm": norm}, norm=norm)


def qwen3_next_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Qwen3-Next that make each engine module, by engine name; see `TensorNames`."""
    linear = "model.layers.{i}.linear_attn"
    inputs: TensorNames = {
        "layers.{i}.state.in": Transformed((f"{linear}.in_proj_qkvz",), ungroup_inputs, _group_inputs, moves="rows"),
        "layers.{i}.state.gates": Transformed((f"{linear}.in_proj_ba",), ungroup_gates, _group_gates, moves="rows"),
    }
    return qwen2_moe_names(config) | gated_attention_names() | delta_net_names(linear) | inputs


def gated_attention_names() -> TensorNames:
    """The modules of gated attention, whose q_proj has the queries and the gate of each head, and of norms with weight 1 + w."""
    attention, q = "model.layers.{i}.self_attn", "model.layers.{i}.self_attn.q_proj"
    gate = "layers.{i}.attention.gate"
    names: TensorNames = {
        "layers.{i}.attention.qkv": Transformed(
            (q, f"{attention}.k_proj", f"{attention}.v_proj"), queries_keys_values, _projections, (gate,), "rows"
        ),
        gate: Transformed((q,), attention_gates, partners=("layers.{i}.attention.qkv",), moves="rows"),
    }
    norms = {
        "norm": "model.norm",
        "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.attention.q_norm": f"{attention}.q_norm",
        "layers.{i}.attention.k_norm": f"{attention}.k_norm",
    }
    return names | {name: Transformed((source,), add_one, subtract_one) for name, source in norms.items()}


def delta_net_names(block: str) -> TensorNames:
    """The modules of the gated delta net `block`, without its input projections."""
    return {
        "layers.{i}.state.out": f"{block}.out_proj",
        "layers.{i}.state.conv": Transformed((f"{block}.conv1d",), squeeze_conv, unsqueeze_conv),
        "layers.{i}.state.a_log": f"{block}.A_log",
        "layers.{i}.state.dt_bias": f"{block}.dt_bias",
        "layers.{i}.state.norm": f"{block}.norm",
    }


def _heads(config: ModelConfig) -> int:
    """The number of query heads of layers with attention."""
    return next((layer.attention.num_heads for layer in config.layers if layer.attention is not None), 1)


def queries_keys_values(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of q, k and v, from q_proj with the queries and the gate of each head, k_proj and v_proj."""
    queries: Tensor = tensors[0].unflatten(0, (_heads(config), 2, -1))[:, 0].flatten(0, 1)
    return torch.cat((queries, *tensors[1:]))


def attention_gates(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of the gates of all heads, from q_proj with the queries and the gate of each head."""
    gates: Tensor = tensors[0].unflatten(0, (_heads(config), 2, -1))[:, 1].flatten(0, 1)
    return gates


def _projections(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """q_proj, k_proj and v_proj from `queries_keys_values` and `attention_gates`."""
    qkv, gates = tensors
    q, k, v = qkv.tensor_split((len(gates), (len(qkv) + len(gates)) // 2))
    by_head = [rows.unflatten(0, (_heads(config), -1)) for rows in (q, gates)]
    return torch.stack(by_head, dim=1).flatten(0, 2), k, v


def ungroup_inputs(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of q, k, v and output gate, from in_proj_qkvz, which is grouped by key head."""
    state = delta_net(config)
    size = state.num_heads // state.key_heads * state.value_size
    parts = tensors[0].unflatten(0, (state.key_heads, -1)).split((state.key_size, state.key_size, size, size), dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def ungroup_gates(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of beta and time step, from in_proj_ba, which is grouped by key head."""
    parts = tensors[0].unflatten(0, (delta_net(config).key_heads, -1)).chunk(2, dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _group_inputs(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `ungroup_inputs`."""
    state = delta_net(config)
    keys, values = state.key_heads * state.key_size, state.num_heads * state.value_size
    parts = [part.unflatten(0, (state.key_heads, -1)) for part in tensors[0].split((keys, keys, values, values))]
    return (torch.cat(parts, dim=1).flatten(0, 1),)


def _group_gates(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `ungroup_gates`."""
    parts = [part.unflatten(0, (delta_net(config).key_heads, -1)) for part in tensors[0].chunk(2)]
    return (torch.cat(parts, dim=1).flatten(0, 1),)


def delta_net(config: ModelConfig) -> DeltaNetConfig:
    """The gated delta net that all layers without attention have."""
    state = next(layer.state for layer in config.layers if layer.state is not None)
    assert isinstance(state, DeltaNetConfig)
    return state


ARCHITECTURES = (
    Architecture(
        name="Qwen3NextForCausalLM",
        read_config=qwen3_next_config,
        tensor_names=qwen3_next_names,
        family="Qwen3-Next",
        oracle="transformers",
        tensor_parallel="a number of ranks that divides the value heads of the states",
        model_types=("qwen3_next",),
        ignored_tensors=(*IGNORED, "mtp.*"),
        kinds={"num_experts": COUNT},  # 0: a dense model
        ignored_keys=("linear_*", "full_attention_interval", "layer_types"),  # each is read where another key does not replace it
    ),
)
