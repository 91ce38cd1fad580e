"""Seed-OSS: Llama with biases on q, k and v, and separate settings for the bias of the output projection."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import with_defaults


@with_defaults(
    vocab_size=155136, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=524288, attention_bias=True, attention_out_bias=False,
)  # fmt: skip
def seed_oss_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Seed-OSS checkpoint, from `hf`, the data of its config.json."""
    return llama_config(hf, architecture="SeedOssForCausalLM", out_bias=bool(hf["attention_out_bias"]))


ARCHITECTURES = (
    Architecture(
        name="SeedOssForCausalLM",
        read_config=seed_oss_config,
        tensor_names=llama_names,
        family="Seed-OSS",
        oracle="transformers",
        model_types=("seed_oss",),
        ignored_tensors=IGNORED,
    ),
)
