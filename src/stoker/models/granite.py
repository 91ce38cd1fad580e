"""Granite 3: Llama with multipliers on the embeddings, the scores, the blocks' outputs and the logits."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import defaults, revise


@defaults(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0)
def granite_config(hf: dict[str, Any]) -> ModelConfig:
    config = llama_config(hf, architecture="GraniteForCausalLM", scale=float(hf["attention_multiplier"]))
    return revise(
        config,
        layer={"residual_scale": float(hf["residual_multiplier"])},
        embed_scale=float(hf["embedding_multiplier"]),
        logit_scale=1 / hf["logits_scaling"],
    )


register(Architecture("GraniteForCausalLM", granite_config, llama_names, "Granite 3", "transformers", ("granite",), ignored=IGNORED))
