"""MiniCPM 1 and 2: Llama with multipliers on the embeddings, the block outputs and the logits."""

from __future__ import annotations

import math
from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import replace_fields, require_values, with_defaults
from stoker.models.config_values import COUNT


@with_defaults(max_position_embeddings=2048, tie_word_embeddings=True, scale_emb=1, dim_model_base=1, scale_depth=1)
def minicpm_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a MiniCPM checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, num_experts=0, mlp_bias=False)
    config = llama_config(hf, architecture="MiniCPMForCausalLM")
    return replace_fields(
        config,
        layer={"residual_scale": hf["scale_depth"] / math.sqrt(config.num_layers)},
        embed_scale=float(hf["scale_emb"]),
        logit_scale=hf["dim_model_base"] / config.hidden_size,
    )


ARCHITECTURES = (
    Architecture(
        name="MiniCPMForCausalLM",
        read_config=minicpm_config,
        tensor_names=llama_names,
        family="MiniCPM 1, 2 (dense)",
        oracle="the same weights as Granite of transformers",
        model_types=("minicpm",),
        ignored_tensors=IGNORED,
        kinds={"num_experts": COUNT},
    ),
)
