"""SmolLM3: Llama in which every fourth layer has no positional encoding, and optionally a sliding window."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_head_size, read_layer_types, read_per_layer, read_rope, replace_fields, with_defaults


@with_defaults(
    vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4,
    max_position_embeddings=32768, no_rope_layer_interval=4, tie_word_embeddings=True,
)  # fmt: skip
def smollm3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a SmolLM3 checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="SmolLM3ForCausalLM", rope=read_rope(hf, dim=read_head_size(hf), theta=2e6))
    layers = range(config.num_layers)
    rotary = read_per_layer(hf, "no_rope_layers", len(layers), [(i + 1) % hf["no_rope_layer_interval"] != 0 for i in layers])
    window = hf.get("sliding_window")
    windowed = bool(hf.get("use_sliding_window")) and bool(window)
    types = read_layer_types(hf, ["sliding_attention" if windowed and not rotary[i] else "full_attention" for i in layers])

    def attention(i: int) -> dict[str, Any]:
        """The fields of layer number i that differ from those of Llama."""
        return ({} if rotary[i] else {"rope": None}) | ({"window": window} if types[i] == "sliding_attention" else {})

    return replace_fields(config, attention=attention)


ARCHITECTURES = (
    Architecture(
        name="SmolLM3ForCausalLM",
        read_config=smollm3_config,
        tensor_names=llama_names,
        family="SmolLM3",
        oracle="transformers",
        model_types=("smollm3",),
        ignored_tensors=IGNORED,
        # Each is read where another key does not replace it; max_window_layers is a remnant of Qwen 2.
        ignored_keys=("no_rope_layer_interval", "sliding_window", "use_sliding_window", "max_window_layers"),
    ),
)
