"""Apertus: Llama with norms on the queries and keys of each head, and MLPs without a gate whose activation has learned parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.core.model_config import MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_head_size, read_rope, replace_fields, require_values, value_or, with_defaults
from stoker.models.config_values import NAME

_ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


@with_defaults(
    vocab_size=131072, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, max_position_embeddings=65536,
    rms_norm_eps=1e-5, hidden_act="xielu",
)  # fmt: skip
def apertus_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an Apertus checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, hidden_act="xielu", mlp_bias=False, post_norm=False, qk_norm=True)
    if hf.get("rope_parameters") is None and hf.get("rope_scaling") is None:
        hf = hf | {"rope_parameters": _ROPE}
    config = llama_config(
        hf | {"hidden_act": "silu"},
        architecture="ApertusForCausalLM",
        rope=read_rope(hf, dim=read_head_size(hf), theta=12e6),
        qk_norm=NormConfig(eps=value_or(hf, "rms_norm_eps", 1e-5)),
    )
    return replace_fields(config, layer={"mlp": MLPConfig(size=hf["intermediate_size"], activation="xielu", gated=False)})


def apertus_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Apertus that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    activation = f"{layer}.mlp.act_fn"
    parameters = tuple(f"{activation}.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
    return llama_names(config) | {
        "layers.{i}.attention_norm": f"{layer}.attention_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.feedforward_layernorm",
        "layers.{i}.mlp.up": f"{layer}.mlp.up_proj",
        "layers.{i}.mlp.activation": Transformed(parameters, lambda tensors, config: activation_parameters(tensors), _stored_parameters),
    }


def activation_parameters(tensors: list[Tensor]) -> Tensor:
    """float32 [4]: the parameters of `ops.xielu` from alpha_p, alpha_n (before softplus), beta and eps."""
    alpha_p, alpha_n, beta, eps = (tensor.float().reshape(1) for tensor in tensors)
    softplus = torch.nn.functional.softplus
    return torch.cat((softplus(alpha_p), beta + softplus(alpha_n), beta, eps))


def _stored_parameters(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """alpha_p and alpha_n (before softplus) of shape [1], beta and eps, from `activation_parameters`."""
    alpha_p, alpha_n, beta, eps = tensors[0].double()
    before_softplus = [(value + torch.log(-torch.expm1(-value)))[None] for value in (alpha_p, alpha_n - beta)]
    return (*before_softplus, beta, eps)


ARCHITECTURES = (
    Architecture(
        name="ApertusForCausalLM",
        read_config=apertus_config,
        tensor_names=apertus_names,
        family="Apertus",
        oracle="transformers",
        model_types=("apertus",),
        ignored_tensors=IGNORED,
        kinds={"hidden_act": NAME},
    ),
)
