"""Code World Model: Llama 3 in which three of four layers have a sliding window."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_layer_types, replace_fields, require_values, with_defaults

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@with_defaults(
    vocab_size=128256, hidden_size=6144, intermediate_size=21504, num_hidden_layers=64, num_attention_heads=48, num_key_value_heads=8,
    head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, sliding_window=8192,
)  # fmt: skip
def cwm_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a CWM checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False)
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = hf | {"rope_parameters": _LLAMA3}
    config = llama_config(hf, architecture="CwmForCausalLM")
    layer_types = read_layer_types(hf, ["sliding_attention" if i % 4 else "full_attention" for i in range(config.num_layers)])
    local = {"window": hf["sliding_window"]}
    return replace_fields(config, attention=lambda i: local if layer_types[i] == "sliding_attention" else {})


ARCHITECTURES = (
    Architecture(
        name="CwmForCausalLM",
        read_config=cwm_config,
        tensor_names=llama_names,
        family="CWM",
        oracle="transformers",
        model_types=("cwm",),
        ignored_tensors=IGNORED,
    ),
)
