"""Granite 3: Llama with multipliers on the embeddings, the attention scores, the block outputs and the logits."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import replace_fields, with_defaults


@with_defaults(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0)
def granite_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Granite 3 checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="GraniteForCausalLM", scale=float(hf["attention_multiplier"]))
    return replace_fields(
        config,
        layer={"residual_scale": float(hf["residual_multiplier"])},
        embed_scale=float(hf["embedding_multiplier"]),
        logit_scale=1 / hf["logits_scaling"],
    )


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
)
