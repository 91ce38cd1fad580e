"""ERNIE 4.5 (dense): Llama with interleaved rotary embeddings, and one setting for all biases."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_head_size, read_rope, require_values, with_defaults


@with_defaults(
    vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, use_bias=False, tie_word_embeddings=True,
)  # fmt: skip
def ernie_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an ERNIE 4.5 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=hf["use_bias"], mlp_bias=hf["use_bias"])
    biases = {"attention_bias": hf["use_bias"], "mlp_bias": hf["use_bias"]}
    rope = read_rope(hf, dim=read_head_size(hf), interleaved=True, theta=500000.0)
    return llama_config(hf | biases, architecture="Ernie4_5ForCausalLM", rope=rope)


ARCHITECTURES = (
    Architecture(
        name="Ernie4_5ForCausalLM",
        read_config=ernie_config,
        tensor_names=llama_names,
        family="ERNIE 4.5 (dense)",
        oracle="transformers",
        model_types=("ernie4_5",),
        aliases=("Ernie4_5_ForCausalLM",),
        ignored_tensors=IGNORED,
        ignored_keys=("compression_ratio",),
    ),
)
