"""OLMo 3: OLMo 2 in which three of four layers have a sliding window, and only the others scale their rotary embeddings."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import ModelConfig, RopeConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.olmo2 import olmo2_config, olmo2_names
from stoker.models.config_fields import (
    read_head_size,
    read_max_positions,
    read_rope,
    read_window_layers,
    replace_fields,
    value_or,
    with_defaults,
)

_THETA = 500000.0


@with_defaults(hidden_size=4096, num_attention_heads=32, max_position_embeddings=2048, sliding_window=4096, sliding_window_pattern=4)
def olmo3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an OLMo 3 checkpoint, from `hf`, the data of its config.json."""
    size = read_head_size(hf)
    parameters = value_or(hf, "rope_parameters", {})
    if parameters and hf.get("rope_scaling") is not None:
        raise CheckpointError("config.json: both rope_scaling and rope_parameters are set.", cure="Delete one of them.")
    if parameters and not {"full_attention", "sliding_attention"} & parameters.keys():
        raise CheckpointError(
            "config.json: rope_parameters must have the keys full_attention and sliding_attention.",
            cure="Write rope_theta and rope_scaling instead.",
        )
    wide = read_rope(hf, dim=size, theta=_THETA, kind="full_attention")
    if parameters:
        local = read_rope(hf, dim=size, theta=_THETA, kind="sliding_attention")
    else:
        local = RopeConfig(dim=size, theta=wide.theta)
    config = olmo2_config(hf | {"rope_scaling": None, "rope_parameters": None})
    layer_types = read_window_layers(hf, config.num_layers)

    def attention(i: int) -> dict[str, Any]:
        """The fields of layer number i that differ from those of OLMo 2."""
        return {"rope": local, "window": hf["sliding_window"]} if layer_types[i] == "sliding_attention" else {"rope": wide}

    return replace_fields(config, attention=attention, architecture="Olmo3ForCausalLM", max_positions=read_max_positions(hf, wide))


ARCHITECTURES = (
    Architecture(
        name="Olmo3ForCausalLM",
        read_config=olmo3_config,
        tensor_names=olmo2_names,
        family="OLMo 3",
        oracle="transformers",
        model_types=("olmo3",),
        ignored_keys=("sliding_window",),  # read for the layers that have one
    ),
)
