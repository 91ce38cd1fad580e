"""Phi-3 and Phi-4: Llama with fused qkv and gate_up weights, and longrope; the mini models rotate part of each head."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import with_defaults


@with_defaults(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)  # fmt: skip
def phi3_config(hf: dict[str, Any]) -> ModelConfig:
    return llama_config(hf, architecture="Phi3ForCausalLM", window=hf.get("sliding_window"))


def phi3_names(config: ModelConfig) -> TensorNames:
    layer = "model.layers.{i}"
    return llama_names(config) | {
        "layers.{i}.attention.qkv": f"{layer}.self_attn.qkv_proj",
        "layers.{i}.mlp.up": f"{layer}.mlp.gate_up_proj",
    }


ARCHITECTURES = (
    Architecture(
        name="Phi3ForCausalLM",
        read_config=phi3_config,
        tensor_names=phi3_names,
        family="Phi-3, Phi-4",
        oracle="transformers",
        model_types=("phi3",),
        ignored_tensors=IGNORED,
    ),
)
