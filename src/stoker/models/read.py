"""Reading a Hugging Face config.json: the fields that many families spell alike."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.layers.config import RopeConfig

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_quick", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


def activation(hf: dict[str, Any], key: str = "hidden_act", default: str = "silu") -> str:
    """The activation's name here. Raises CheckpointError for one that has no kernel."""
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: {key}={name!r} is not supported.", cure=f"Supported: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def head_size(hf: dict[str, Any]) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def rope(hf: dict[str, Any], *, dim: int, interleaved: bool = False) -> RopeConfig:
    """Rotary settings from rope_theta and rope_scaling, or from rope_parameters as newer files write them."""
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor")
    if partial:
        dim = int(dim * partial)
    fields: dict[str, Any] = {"dim": dim, "theta": float(theta), "interleaved": interleaved, "scaling": kind}
    if kind != "default":
        original = scaling.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
        fields["original_max_positions"] = original or hf.get("max_position_embeddings", 2048)
        if kind == "longrope" and "factor" not in scaling and original:
            scaling["factor"] = hf.get("max_position_embeddings", original) / original
        plain = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        fields |= {name: float(scaling[name]) for name in plain if scaling.get(name) is not None}
        if "truncate" in scaling:
            fields["truncate"] = bool(scaling["truncate"])
        fields |= {name: tuple(map(float, scaling[name])) for name in ("short_factor", "long_factor") if name in scaling}
    return RopeConfig(**fields)
