"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, rotary on part of each head, biases everywhere."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_activation, read_head_size, read_rope, replace_fields, with_defaults


@with_defaults(
    vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32, hidden_act="gelu_new",
    layer_norm_eps=1e-5, qk_layernorm=False,
)  # fmt: skip
def phi_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Phi-1 or 2 checkpoint, from `hf`, the data of its config.json."""
    norm = NormConfig(kind="layer", eps=hf["layer_norm_eps"], bias=True)
    mlp = MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf), gated=False, up_bias=True, down_bias=True)
    config = llama_config(
        hf,
        architecture="PhiForCausalLM",
        qkv_bias=True,
        out_bias=True,
        rope=read_rope(hf, dim=read_head_size(hf), partial=0.5),
        qk_norm=norm if hf["qk_layernorm"] else None,
    )
    return replace_fields(config, layer={"layout": "parallel", "norm": norm, "mlp": mlp}, norm=norm, head_bias=True)


def phi_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Phi-1 or 2 that make each engine module, by engine name; see `TensorNames`."""
    layer = "model.layers.{i}"
    return llama_names(config) | {
        "norm": "model.final_layernorm",
        "layers.{i}.attention.out": f"{layer}.self_attn.dense",
        "layers.{i}.attention.q_norm": f"{layer}.self_attn.q_layernorm",
        "layers.{i}.attention.k_norm": f"{layer}.self_attn.k_layernorm",
        "layers.{i}.mlp.up": f"{layer}.mlp.fc1",
        "layers.{i}.mlp.down": f"{layer}.mlp.fc2",
    }


ARCHITECTURES = (
    Architecture(
        name="PhiForCausalLM",
        read_config=phi_config,
        tensor_names=phi_names,
        family="Phi-1, Phi-1.5, Phi-2",
        oracle="transformers",
        model_types=("phi",),
        ignored_tensors=IGNORED,
    ),
)
