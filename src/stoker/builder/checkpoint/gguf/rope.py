"""Rotary scaling in the metadata and tensors of a GGUF file, as `rope_scaling` of a config.json."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.metadata import Metadata

# One divisor per frequency. With rope_freqs, Llama 3.1's scaling was evaluated by the converter.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def rope_scaling(m: Metadata) -> dict[str, Any] | None:
    """The rope_scaling of config.json, None without scaling. Raises CheckpointError for scaling that config.json cannot express."""
    if m.has_tensor(ROPE_LONG) or m.has_tensor(ROPE_SHORT):
        return _long_rope(m)
    m.require_value("rope.scaling.attn_factor", 1.0)
    if m.has_tensor(ROPE_FREQS):
        m.require_value("rope.scaling.type", "none", "linear", "llama3")
        m.require_value("rope.scaling.factor", m.value("rope.scaling.factor", 1.0))  # the divisors contain it
        m.value("rope.scaling.original_context_length")
        factors = m.read_vector(ROPE_FREQS)
        positions = m.get("context_length", int)
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": positions, **same}
    kind = m.get("rope.scaling.type", str, "none")
    original = m.get("rope.scaling.original_context_length", int)
    factor = m.get("rope.scaling.factor", float, 1.0)
    if kind == "none":
        factor = m.get("rope.scale_linear", float, 1.0)  # the key of older files
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling | _yarn(m) if kind == "yarn" else scaling


def _yarn(m: Metadata) -> dict[str, Any]:
    """The settings of YaRN beyond its factor. Raises CheckpointError for those that llama.cpp has and config.json has not."""
    m.require_value("rope.scaling.yarn_attn_factor", 1.0)
    m.require_value("rope.scaling.yarn_ext_factor", 1.0)
    found = {name: m.get(f"rope.scaling.yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
    return {name: value for name, value in found.items() if value is not None}


def _long_rope(m: Metadata) -> dict[str, Any]:
    """Phi-3's scaling: divisors of the frequencies within and beyond the original context, and a factor of cos and sin."""
    m.require_value("rope.scaling.type", "longrope", "none", "su")
    m.require_value("rope.scaling.factor", 1.0)
    original = m.get("rope.scaling.original_context_length", int, m.get("context_length", int))
    factors = {"short_factor": m.read_vector(ROPE_SHORT), "long_factor": m.read_vector(ROPE_LONG)}
    attention = {"attention_factor": value} if (value := m.get("rope.scaling.attn_factor", float)) is not None else {}
    return {"rope_type": "longrope", "original_max_position_embeddings": original, **factors, **attention}
