"""Phi-1, 1.5, 2: parallel blocks under one layer norm, rotary on part of a head, biases everywhere."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, NormConfig
from stoker.models.architecture import Architecture, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import activation, defaults, head_size, revise, rope


@defaults(
    vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32, hidden_act="gelu_new",
    layer_norm_eps=1e-5, qk_layernorm=False,
)  # fmt: skip
def phi_config(hf: dict[str, Any]) -> ModelConfig:
    norm = NormConfig(kind="layer", eps=hf["layer_norm_eps"], bias=True)
    mlp = MLPConfig(size=hf["intermediate_size"], activation=activation(hf), gated=False, up_bias=True, down_bias=True)
    config = llama_config(
        hf,
        architecture="PhiForCausalLM",
        qkv_bias=True,
        out_bias=True,
        rope=rope(hf, dim=head_size(hf), partial=0.5),
        qk_norm=norm if hf["qk_layernorm"] else None,
    )
    return revise(config, layer={"layout": "parallel", "norm": norm, "mlp": mlp}, norm=norm, head_bias=True)


def phi_names(config: ModelConfig) -> Names:
    layer = "model.layers.{i}"
    return llama_names(config) | {
        "norm": "model.final_layernorm",
        "layers.{i}.attention.out": f"{layer}.self_attn.dense",
        "layers.{i}.attention.q_norm": f"{layer}.self_attn.q_layernorm",
        "layers.{i}.attention.k_norm": f"{layer}.self_attn.k_layernorm",
        "layers.{i}.mlp.up": f"{layer}.mlp.fc1",
        "layers.{i}.mlp.down": f"{layer}.mlp.fc2",
    }


register(Architecture("PhiForCausalLM", phi_config, phi_names, "Phi-1, Phi-1.5, Phi-2", "transformers", ("phi",), ignored=IGNORED))
