"""Granite 3, Granite MoE and PowerMoE: Llama with multipliers on the embeddings, attention scores, block outputs and logits.

The MoE models have experts, and optionally a shared one.
"""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_activation, replace_fields, require_values, with_defaults


@with_defaults(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0)
def granite_config(hf: dict[str, Any], *, architecture: str = "GraniteForCausalLM") -> ModelConfig:
    """The ModelConfig of a Granite 3 checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture=architecture, scale=float(hf["attention_multiplier"]))
    return replace_fields(
        config,
        layer={"residual_scale": float(hf["residual_multiplier"])},
        embed_scale=float(hf["embedding_multiplier"]),
        logit_scale=1 / hf["logits_scaling"],
    )


@with_defaults(num_local_experts=8, num_experts_per_tok=2, intermediate_size=11008)
def granite_moe_config(hf: dict[str, Any], *, architecture: str = "GraniteMoeForCausalLM", shared: MLPConfig | None = None) -> ModelConfig:
    """The ModelConfig of a Granite 3 MoE or PowerMoE checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, mlp_bias=False)
    moe = MoEConfig(
        shared=shared,
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf)),
        score="softmax_topk",
    )
    return replace_fields(granite_config(hf, architecture=architecture), layer={"mlp": moe})


@with_defaults(shared_intermediate_size=0)
def granite_moe_shared_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Granite MoE checkpoint with a shared expert, from `hf`, the data of its config.json."""
    size = hf["shared_intermediate_size"]
    shared = MLPConfig(size=size, activation=read_activation(hf)) if size else None
    return granite_moe_config(hf, architecture="GraniteMoeSharedForCausalLM", shared=shared)


def granite_moe_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Granite 3 MoE that make each engine module, by engine name; see `TensorNames`."""
    moe = "model.layers.{i}.block_sparse_moe"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{moe}.router.layer",
        "layers.{i}.mlp.experts.up": f"{moe}.input_linear",
        "layers.{i}.mlp.experts.down": f"{moe}.output_linear",
        "layers.{i}.mlp.shared.up": "model.layers.{i}.shared_mlp.input_linear",
        "layers.{i}.mlp.shared.down": "model.layers.{i}.shared_mlp.output_linear",
    }


ARCHITECTURES = (
    Architecture(
        name="GraniteForCausalLM",
        read_config=granite_config,
        tensor_names=llama_names,
        family="Granite 3",
        oracle="transformers",
        model_types=("granite",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="GraniteMoeForCausalLM",
        read_config=granite_moe_config,
        tensor_names=granite_moe_names,
        family="Granite 3 MoE, PowerMoE",
        oracle="transformers",
        model_types=("granitemoe",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="GraniteMoeSharedForCausalLM",
        read_config=granite_moe_shared_config,
        tensor_names=granite_moe_names,
        family="Granite MoE with a shared expert",
        oracle="transformers",
        model_types=("granitemoeshared",),
        ignored_tensors=IGNORED,
    ),
)
