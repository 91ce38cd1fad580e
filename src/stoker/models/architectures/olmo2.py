"""OLMo 2: Llama with norms after each block instead of before it, and q/k norms over all heads together."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import llama_config, llama_names
from stoker.models.config_fields import replace_fields, with_defaults


@with_defaults(vocab_size=50304, rms_norm_eps=1e-5)
def olmo2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a OLMo 2 checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="Olmo2ForCausalLM", qk_norm=NormConfig(eps=hf["rms_norm_eps"]), qk_norm_full=True)
    return replace_fields(config, layer={"layout": "post"})


def olmo2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of OLMo 2 that make each engine module, by engine name; see `TensorNames`."""
    return llama_names(config) | {
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    }


ARCHITECTURES = (
    Architecture(
        name="Olmo2ForCausalLM",
        read_config=olmo2_config,
        tensor_names=olmo2_names,
        family="OLMo 2",
        oracle="transformers",
        model_types=("olmo2",),
    ),
)
