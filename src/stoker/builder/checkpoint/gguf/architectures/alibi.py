"""bloom and mpt: linear biases in place of rotary embeddings."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import gpt_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_bloom(m: Metadata) -> dict[str, Any]:
    """BLOOM. The converter moves q, k and v of all heads apart."""
    config = gpt_config(m)
    width = config.pop("n_inner", 4 * config["n_embd"])
    if width != 4 * config["n_embd"]:
        raise m.unsupported("feed_forward_length", width, "Only four times embedding_length is.")
    m.require_value("attention.head_count_kv", config["n_head"])
    m.require_value("attention.max_alibi_bias", 8.0)
    return config | {"hidden_size": config.pop("n_embd"), "seq_length": config.pop("n_positions", 2048)}


def _read_mpt(m: Metadata) -> dict[str, Any]:
    """MPT with linear biases. A file with a table of positions is rejected by its tensor."""
    config = gpt_config(m)
    width, hidden = config.pop("n_inner", 4 * config["n_embd"]), config.pop("n_embd")
    if width % hidden:
        raise m.unsupported("feed_forward_length", width, "Only a multiple of embedding_length is.")
    m.require_value("attention.head_count_kv", config["n_head"])
    slope: float = m.get("attention.max_alibi_bias", float, 8.0)
    attention: dict[str, Any] = {"alibi": True, "alibi_bias_max": int(slope) if slope.is_integer() else slope}
    if clip := m.get("attention.clamp_kqv", float, 0.0):
        attention["clip_qkv"] = clip
    sizes = {"d_model": hidden, "n_heads": config.pop("n_head"), "n_layers": config.pop("n_layer"), "expansion_ratio": width // hidden}
    sizes["max_seq_len"] = config.pop("n_positions", 2048)
    return config | sizes | {"attn_config": attention}


ARCHITECTURES = (
    GGUFArchitecture(name="bloom", model_types=("bloom",), read_config=_read_bloom),
    GGUFArchitecture(name="mpt", model_types=("mpt",), read_config=_read_mpt),
)
