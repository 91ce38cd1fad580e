"""OLMo 2: norms after the blocks, and over all heads' queries and keys together."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, Names, register
from stoker.models.llama import llama_config, llama_names
from stoker.models.read import defaults, revise


@defaults(vocab_size=50304, rms_norm_eps=1e-5)
def olmo2_config(hf: dict[str, Any]) -> ModelConfig:
    config = llama_config(hf, architecture="Olmo2ForCausalLM", qk_norm=NormConfig(eps=hf["rms_norm_eps"]), qk_norm_full=True)
    return revise(config, layer={"layout": "post"})


def olmo2_names(config: ModelConfig) -> Names:
    return llama_names(config) | {
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    }


register(
    Architecture(
        "Olmo2ForCausalLM",
        olmo2_config,
        olmo2_names,
        "OLMo 2",
        "transformers",
        ("olmo2",),
    )
)
