"""EXAONE 4: norms after each block, norms per head, and sliding windows; layers with full attention have no positional encoding."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import llama_config
from stoker.models.architectures.olmo2 import olmo2_names
from stoker.models.config_fields import read_layer_types, replace_fields, require_values, with_defaults


@with_defaults(
    vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5,
)  # fmt: skip
def exaone4_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an EXAONE 4 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False, mlp_bias=False)
    config = llama_config(hf, architecture="Exaone4ForCausalLM", qk_norm=NormConfig(eps=hf["rms_norm_eps"]))
    config = replace_fields(config, layer={"layout": "post"})
    window = {"sliding_window": 4096, "sliding_window_pattern": 4} | hf
    if window["sliding_window"] is None:
        return config
    layer_types = read_layer_types(window, config.num_layers)
    local = {"window": window["sliding_window"]}
    return replace_fields(config, attention=lambda i: local if layer_types[i] == "sliding_attention" else {"rope": None})


ARCHITECTURES = (
    Architecture(
        name="Exaone4ForCausalLM",
        read_config=exaone4_config,
        tensor_names=olmo2_names,
        family="EXAONE 4",
        oracle="transformers",
        model_types=("exaone4",),
        ignored_tensors=("*.rotary_emb.inv_freq",),
        ignored_keys=("sliding_window_pattern", "layer_types"),  # each is read where another key does not replace it
    ),
)
