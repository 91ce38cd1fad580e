"""Metadata that many architectures share, as the keys of a config.json."""

from __future__ import annotations

import math
from typing import Any

from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.gguf.rope import rope_scaling

# Metadata key → config.json key. Values are copied, and the reader of config.json checks them.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
RMS_EPSILON, NORM_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def llama_config(m: Metadata, *, partial_rotary: bool = False, rotary: bool = True, norm_key: str = RMS_EPSILON) -> dict[str, Any]:
    """The keys of a model that resembles Llama.

    All are set where llama.cpp has a default, because the readers of config.json have other ones.
    `norm_key` is the metadata key of the epsilon of norms. With `partial_rotary`, a part of each head is rotated; otherwise
    rope.dimension_count must be the head size. Without `rotary`, the model has no rotary embedding, and its keys are not read.
    """
    config = {config_key: value for key, config_key in _KEYS.items() if (value := m.value(key)) is not None}
    config |= vocabulary_config(m) | {"hidden_act": "silu"}
    config["rms_norm_eps"] = m.require(norm_key, float)
    config["num_key_value_heads"] = config.get("num_key_value_heads", config.get("num_attention_heads"))
    config["head_dim"] = size = head_size(config)
    m.require_value("attention.value_length", size)
    m.require_value("attention.causal", True)
    if not rotary:
        return config
    config["rope_theta"] = config.get("rope_theta", 10000.0)
    rotated = m.value("rope.dimension_count", size)
    if not partial_rotary:
        m.require_value("rope.dimension_count", size)
    elif size and type(rotated) is int:
        config["partial_rotary_factor"] = fraction(rotated, size)
    if (scaling := rope_scaling(m)) is not None:
        config["rope_scaling"] = scaling
    return config


def vocabulary_config(m: Metadata) -> dict[str, Any]:
    """The size of the vocabulary, and whether the head is the embedding."""
    embedding = m.tensors.get("token_embd.weight")
    return {"vocab_size": embedding[0] if embedding else 0, "tie_word_embeddings": not m.has_tensor("output.weight")}


def per_layer(m: Metadata, key: str) -> list[int]:
    """A key whose value is an array with a number for each block, or the number of all. Raises CheckpointError for another value."""
    blocks, value = m.require("block_count", int), m.value(key)
    values = value if isinstance(value, list) else [value] * blocks
    if len(values) != blocks or any(type(each) is not int or each < 0 for each in values):
        raise m.unsupported(key, value, f"A whole number for each of the {blocks} blocks is.")
    return values


def head_size(config: dict[str, Any]) -> int | None:
    """The number of features of a head, or None for sizes that the reader of config.json rejects."""
    if config.get("head_dim") is not None:
        size: int = config["head_dim"]
        return size
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    return hidden // heads if type(heads) is int and type(hidden) is int and heads > 0 else None


def fraction(part: int, whole: int) -> float:
    """The number x nearest to part / whole for which int(whole * x) is `part`."""
    result = part / whole
    return result if int(whole * result) == part else math.nextafter(result, 2.0)


def layer_norm_config(m: Metadata, key: str = "layer_norm_eps", **options: Any) -> dict[str, Any]:
    """`llama_config` for a model with layer norms. `key` is the key of their epsilon in config.json."""
    config = llama_config(m, norm_key=NORM_EPSILON, **options)
    return {key if name == "rms_norm_eps" else name: value for name, value in config.items()}


def gpt_config(m: Metadata) -> dict[str, Any]:
    """The keys of a model with the config.json of GPT-2: no grouped queries, and layer norms."""
    config = layer_norm_config(m, "layer_norm_epsilon", rotary=False)
    names = {
        "max_position_embeddings": "n_positions", "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "intermediate_size": "n_inner", "vocab_size": "vocab_size", "tie_word_embeddings": "tie_word_embeddings",
        "layer_norm_epsilon": "layer_norm_epsilon",
    }  # fmt: skip
    return {name: config[key] for key, name in names.items() if key in config}


def expert_config(m: Metadata) -> dict[str, Any]:
    """num_experts_per_tok, num_experts and moe_intermediate_size. The width of experts is that of their tensors."""
    down = next((shape for name, shape in m.tensors.items() if name.endswith(".ffn_down_exps.weight")), ())
    width = m.value("expert_feed_forward_length", down[-1] if down else m.value("feed_forward_length"))
    experts = {"num_experts": m.require("expert_count", int), "num_experts_per_tok": m.require("expert_used_count", int)}
    return experts | {"moe_intermediate_size": width}


def shared_expert_width(m: Metadata) -> int | None:
    """The width of the shared expert, from its tensor; None without one."""
    down = next((shape for name, shape in m.tensors.items() if name.endswith(".ffn_down_shexp.weight")), None)
    width = m.value("expert_shared_feed_forward_length", down[-1] if down else None)
    if down and width != down[-1]:
        raise m.unsupported("expert_shared_feed_forward_length", width, f"The tensors of the shared expert have {down[-1]} features.")
    return down[-1] if down else None


def layer_types(m: Metadata, period: int) -> list[str]:
    """The kind of attention of each layer: every `period`-th layer has full attention unless the file says otherwise."""
    layers: int = m.require("block_count", int)
    pattern = m.value("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != layers or any(type(element) not in (bool, int) for element in pattern):
            raise m.unsupported("attention.sliding_window_pattern", pattern, f"A boolean for each of the {layers} layers is.")
        slides = [bool(element) for element in pattern]
    else:
        step: int = m.get("attention.sliding_window_pattern", int, period)
        slides = [step == 0 or (i + 1) % step != 0 for i in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]
