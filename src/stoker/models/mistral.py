"""Mistral: Llama with a sliding window. Mixtral: its MLPs are eight experts, two a token."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import activation, defaults, revise


@defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096)
def mistral_config(hf: dict[str, Any]) -> ModelConfig:
    return llama_config(hf, architecture="MistralForCausalLM", window=hf["sliding_window"])


@defaults(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
def mixtral_config(hf: dict[str, Any]) -> ModelConfig:
    config = llama_config(hf, architecture="MixtralForCausalLM", window=hf.get("sliding_window"))
    moe = MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["intermediate_size"], activation=activation(hf)),
    )
    return revise(config, layer={"mlp": moe})


def mixtral_names(config: ModelConfig) -> Names:
    moe = "model.layers.{i}.block_sparse_moe"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{moe}.gate",
        "layers.{i}.mlp.experts.up": (f"{moe}.experts.{{e}}.w1", f"{moe}.experts.{{e}}.w3"),
        "layers.{i}.mlp.experts.down": f"{moe}.experts.{{e}}.w2",
    }


register(
    Architecture("MistralForCausalLM", mistral_config, llama_names, "Mistral", "transformers", model_types=("mistral",), ignored=IGNORED),
    Architecture("MixtralForCausalLM", mixtral_config, mixtral_names, "Mixtral", "transformers", model_types=("mixtral",), ignored=IGNORED),
)
