"""Reading a Hugging Face config.json: the fields that many families spell alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from stoker.base.errors import CheckpointError, ConfigError
from stoker.core.model_config import ModelConfig, RopeConfig
from stoker.layers.rope import METHODS

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_quick", "relu": "relu", "relu2": "relu2",
}  # fmt: skip

# GPT-2's configuration class answers to the common names, too.
GPT_SPELLINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

Fields = dict[str, Any] | Callable[[int], dict[str, Any]]


def defaults(also: dict[str, str] | None = None, **values: Any) -> Callable[[Callable[..., ModelConfig]], Callable[..., ModelConfig]]:
    """A reader's values for keys that config.json leaves out: those of the family's own configuration class.

    `also` maps other spellings of keys to the reader's own.
    """

    def wrap(read: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
        @functools.wraps(read)
        def reader(hf: dict[str, Any], **more: Any) -> ModelConfig:
            spelled = {key: hf[other] for other, key in (also or {}).items() if hf.get(other) is not None}
            return read({**values, **hf, **spelled}, **more)

        return reader

    return wrap


def revise(config: ModelConfig, *, attention: Fields | None = None, layer: Fields | None = None, **model: Any) -> ModelConfig:
    """`config` with fields replaced: of every layer's attention, of every layer, of the model. A function gets the layer's number."""

    def fields(given: Fields | None, i: int) -> dict[str, Any]:
        return given(i) if callable(given) else given or {}

    layers = []
    for i, old in enumerate(config.layers):
        mixer = msgspec.structs.replace(old.attention, **fields(attention, i))
        layers.append(msgspec.structs.replace(old, attention=mixer, **fields(layer, i)))
    return msgspec.structs.replace(config, layers=tuple(layers), **model)


def refuse(hf: dict[str, Any], **expected: Any) -> None:
    """Raises CheckpointError for a key whose value is not the one that is supported (absent and null are fine)."""
    for key, value in expected.items():
        if hf.get(key) is not None and hf[key] != value:
            raise CheckpointError(f"config.json: {key}={hf[key]!r} is not supported.", cure=f"Only {key}={value!r} is.")


def activation(hf: dict[str, Any], key: str = "hidden_act", default: str = "silu") -> str:
    """The activation's name here. Raises CheckpointError for one that has no kernel."""
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: {key}={name!r} is not supported.", cure=f"Supported: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def head_size(hf: dict[str, Any]) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def rope(
    hf: dict[str, Any], *, dim: int, interleaved: bool = False, theta: float = 10000.0, partial: float = 1.0, kind: str | None = None
) -> RopeConfig:
    """Rotary settings from rope_theta and rope_scaling, or from rope_parameters as newer files write them.

    `theta` and `partial` are the family's defaults; `kind` picks one of several sets (sliding_attention, full_attention).
    """
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if kind is not None and kind in scaling:
        scaling = dict(scaling[kind] or {})
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or theta
    share = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or partial
    return rope_scaling(RopeConfig(dim=int(dim * share), theta=float(theta), interleaved=interleaved), scaling, hf)


def rope_scaling(config: RopeConfig, scaling: dict[str, Any], hf: dict[str, Any]) -> RopeConfig:
    """`config` with the method that `scaling` names. Raises CheckpointError for an unknown one."""
    method = scaling.get("rope_type") or scaling.get("type") or "default"
    method = {"su": "longrope"}.get(method, method)
    if method not in METHODS:
        raise CheckpointError(f"config.json: rope_scaling of type {method!r} is not supported.", cure=f"Supported: {', '.join(METHODS)}.")
    if method == "default":
        return config
    fields: dict[str, Any] = {"scaling": method, "original_max_positions": _original_positions(method, scaling, hf)}
    if method in ("longrope", "yarn") and scaling.get("factor") is None:
        scaling["factor"] = hf.get("max_position_embeddings", 2048) / fields["original_max_positions"]
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    fields |= {name: float(scaling[name]) for name in numbers if scaling.get(name) is not None}
    if scaling.get("truncate") is not None:
        fields["truncate"] = bool(scaling["truncate"])
    fields |= {name: tuple(map(float, scaling[name])) for name in ("short_factor", "long_factor") if scaling.get(name)}
    return msgspec.structs.replace(config, **fields)


def _original_positions(method: str, scaling: dict[str, Any], hf: dict[str, Any]) -> int:
    """The context that the frequencies were trained for."""
    longest = hf.get("max_position_embeddings", 2048)
    if method in ("dynamic", "linear"):
        return longest
    return hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or longest


def positions(hf: dict[str, Any], scaled: RopeConfig | None, key: str = "max_position_embeddings", default: int = 2048) -> int:
    """The longest sequence that the positions are good for: stretched where config.json gives the length before stretching."""
    longest = hf.get(key) or default
    if scaled is not None and scaled.scaling in ("dynamic", "yarn"):
        return max(longest, int(scaled.original_max_positions * scaled.factor))
    return longest


def _check_rotary(base: float | None, scaling: str | None, factor: float | None) -> None:
    if base is not None and not (math.isfinite(base) and base > 1):
        raise ConfigError(f"rotary_base={base!r} is refused.", cure="Use a number above 1, such as 10000.")
    if scaling not in (None, "linear", "dynamic"):
        raise ConfigError(f"rotary_scaling_type={scaling!r} is not supported.", cure="Supported: linear, dynamic.")
    if (scaling is None) != (factor is None):
        raise ConfigError("rotary_scaling_type and rotary_scaling_factor belong together.", cure="Set both or neither.")
    if factor is not None and not (math.isfinite(factor) and factor > 1):
        raise ConfigError(f"rotary_scaling_factor={factor!r} is refused.", cure="Use a number above 1.")


def with_rotary(config: ModelConfig, *, base: float | None = None, scaling: str | None = None, factor: float | None = None) -> ModelConfig:
    """`config` with rotary settings of the build's own (`rotary_base`, `rotary_scaling_type`, `rotary_scaling_factor`).

    Raises ConfigError for a value out of range, for a model without rotary positions, and for a scaling on top of the model's own.
    """
    _check_rotary(base, scaling, factor)
    ropes = {layer.attention.rope for layer in config.layers} - {None}
    if not ropes:
        raise ConfigError(f"{config.architecture} has no rotary positions.", cure="Leave the rotary settings out.")
    own = next((rope.scaling for rope in ropes if rope is not None and rope.scaling != "default"), None)
    if scaling is not None and own is not None:
        raise ConfigError(f"rotary_scaling_type={scaling!r}: the checkpoint stretches its positions itself ({own}).", cure="Leave it out.")
    fields: dict[str, Any] = {} if base is None else {"theta": float(base)}
    if scaling is not None:
        fields |= {"scaling": scaling, "factor": float(factor or 1.0), "original_max_positions": config.max_positions}

    def turned(i: int) -> dict[str, Any]:
        old = config.layers[i].attention.rope
        return {"rope": None if old is None else msgspec.structs.replace(old, **fields)}

    return revise(config, attention=turned, max_positions=int(config.max_positions * (factor or 1)))
