"""Mistral: Llama with a sliding window. Mixtral: Mistral with eight experts as its MLP, two of them per token."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_activation, replace_fields, with_defaults


@with_defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096)
def mistral_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Mistral checkpoint, from `hf`, the data of its config.json.

    The file of Ministral 8B has layer_types, too, which transformers ignores and vLLM uses. It is accepted where no sequence is longer than
    the window, so that both compute the same. Raises CheckpointError for a shorter window.
    """
    window, limit = hf["sliding_window"], hf["max_position_embeddings"]
    if "full_attention" in (hf.get("layer_types") or ()) and window is not None and window < limit:
        raise CheckpointError(
            f"config.json: layer_types with sliding_window={window} < max_position_embeddings={limit} has two meanings for Mistral.",
            cure="Delete layer_types for a window in every layer, or write MinistralForCausalLM for windows as listed.",
        )
    return llama_config(hf, architecture="MistralForCausalLM", window=window)


@with_defaults(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
def mixtral_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Mixtral checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="MixtralForCausalLM", window=hf.get("sliding_window"))
    moe = MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf)),
    )
    return replace_fields(config, layer={"mlp": moe})


def mixtral_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Mixtral that make each engine module, by engine name; see `TensorNames`."""
    moe = "model.layers.{i}.block_sparse_moe"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{moe}.gate",
        "layers.{i}.mlp.experts.up": (f"{moe}.experts.{{e}}.w1", f"{moe}.experts.{{e}}.w3"),
        "layers.{i}.mlp.experts.down": f"{moe}.experts.{{e}}.w2",
    }


ARCHITECTURES = (
    Architecture(
        name="MistralForCausalLM",
        read_config=mistral_config,
        tensor_names=llama_names,
        family="Mistral",
        oracle="transformers",
        model_types=("mistral",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="MixtralForCausalLM",
        read_config=mixtral_config,
        tensor_names=mixtral_names,
        family="Mixtral",
        oracle="transformers",
        model_types=("mixtral",),
        ignored_tensors=IGNORED,
    ),
)
