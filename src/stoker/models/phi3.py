"""Phi-3, Phi-4: Llama with fused qkv and gate_up, longrope, and rotary on part of a head in the mini ones."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import defaults


@defaults(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)  # fmt: skip
def phi3_config(hf: dict[str, Any]) -> ModelConfig:
    return llama_config(hf, architecture="Phi3ForCausalLM", window=hf.get("sliding_window"))


def phi3_names(config: ModelConfig) -> Names:
    layer = "model.layers.{i}"
    return llama_names(config) | {
        "layers.{i}.attention.qkv": f"{layer}.self_attn.qkv_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.gate_up_proj",
    }


register(Architecture("Phi3ForCausalLM", phi3_config, phi3_names, "Phi-3, Phi-4", "transformers", ("phi3",), ignored=IGNORED))
