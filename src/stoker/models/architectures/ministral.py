"""Ministral, Ministral 3, and the language models of Mistral 3: Mistral with a window in some layers, or with scaled queries."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, QueryScaleConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.gemma import LANGUAGE_MODEL_PREFIXES
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.architectures.mistral import mistral_config
from stoker.models.config_fields import read_head_size, read_layer_types, read_rope, replace_fields, value_or, with_defaults
from stoker.models.config_values import choice


@with_defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096)
def ministral_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Ministral checkpoint, from `hf`, the data of its config.json."""
    config, window = llama_config(hf, architecture="MinistralForCausalLM"), hf["sliding_window"]
    kinds = read_layer_types(hf, ["sliding_attention"] * config.num_layers)
    return replace_fields(config, attention=lambda i: {"window": window if kinds[i] == "sliding_attention" else None})


_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@with_defaults(
    vocab_size=131072, intermediate_size=14336, num_hidden_layers=34, num_key_value_heads=8, head_dim=128, max_position_embeddings=262144,
    rms_norm_eps=1e-5,
)  # fmt: skip
def ministral3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Ministral 3 checkpoint, from `hf`, the data of its config.json."""
    scaling = value_or(hf, "rope_parameters", value_or(hf, "rope_scaling", _MINISTRAL3_ROPE))
    hf = hf | {"rope_parameters": scaling, "rope_scaling": None}
    rope, beta = read_rope(hf, dim=read_head_size(hf)), value_or(scaling, "llama_4_scaling_beta", 0.0)
    scale = QueryScaleConfig(interval=scaling["original_max_position_embeddings"], beta=float(beta)) if beta else None
    return llama_config(hf, architecture="Ministral3ForCausalLM", rope=rope, window=hf.get("sliding_window"), query_scale=scale)


# The language model if config.json has no text_config: Mistral Small 3.1.
_MISTRAL3_TEXT: dict[str, Any] = {
    "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip


def mistral3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of a Mistral 3 checkpoint: Mistral or Ministral 3."""
    text = value_or(hf, "text_config", {}) or _MISTRAL3_TEXT
    read = ministral3_config if text.get("model_type") == "ministral3" else mistral_config
    return replace_fields(
        read(text),
        architecture="Mistral3ForConditionalGeneration",
        tie_head=bool(value_or(hf, "tie_word_embeddings", value_or(text, "tie_word_embeddings", True))),
    )


_POSITION_KEY = "*rope_*.max_position_embeddings"  # a copy of the key of the model
ARCHITECTURES = (
    Architecture(
        name="MinistralForCausalLM",
        read_config=ministral_config,
        tensor_names=llama_names,
        family="Ministral 8B",
        oracle="transformers",
        model_types=("ministral",),
        ignored_tensors=IGNORED,
        ignored_keys=("sliding_window",),  # read for the layers that have one
    ),
    Architecture(
        name="Ministral3ForCausalLM",
        read_config=ministral3_config,
        tensor_names=llama_names,
        family="Ministral 3 (text model alone)",
        oracle="transformers",
        model_types=("ministral3",),
        ignored_tensors=IGNORED,
        ignored_keys=(_POSITION_KEY,),
    ),
    Architecture(
        name="Mistral3ForConditionalGeneration",
        read_config=mistral3_config,
        tensor_names=llama_names,
        family="Mistral Small 3.1 and 3.2, Ministral 3 (text)",
        oracle="transformers",
        model_types=("mistral3",),
        ignored_tensors=(*IGNORED, "*vision_tower.*", "*multi_modal_projector.*"),
        tensor_renames=LANGUAGE_MODEL_PREFIXES,
        kinds={"model_type": choice("mistral", "ministral3")},  # of text_config
        ignored_keys=(
            _POSITION_KEY, "vision_config*", "image_token_index", "multimodal_projector_bias", "projector_hidden_act",
            "spatial_merge_size", "vision_feature_layer",
        ),
    ),
)  # fmt: skip
