"""Reads the fields of a Hugging Face config.json that many model families share.

In this package, `hf` always is the data of a config.json.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from stoker.base.errors import CheckpointError, shorten
from stoker.core.model_config import ModelConfig, RopeConfig
from stoker.layers.rope import METHODS
from stoker.models.config_values import ACTIVATIONS, MAX_POSITIONS, refused

# Keys that the configuration class of GPT-2 accepts in addition to its own.
GPT_KEY_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

# New values of fields, the same for every layer or computed from the layer index.
LayerFields = dict[str, Any] | Callable[[int], dict[str, Any]]


def with_defaults(
    aliases: dict[str, str] | None = None, **values: Any
) -> Callable[[Callable[..., ModelConfig]], Callable[..., ModelConfig]]:
    """A decorator of config readers that fills in the keys which config.json leaves out.

    `values` are the defaults of the family's configuration class in transformers, or of its publisher's. `aliases` maps other names of a
    key to the name that the reader uses; a null value under an alias is ignored.
    """

    def decorate(read_config: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
        """The decorated reader."""

        @functools.wraps(read_config)
        def read_with_defaults(hf: dict[str, Any], **options: Any) -> ModelConfig:
            """Read a config.json with default values and aliases applied."""
            renamed = {key: hf[alias] for alias, key in (aliases or {}).items() if hf.get(alias) is not None}
            return read_config(values | hf | renamed, **options)

        return read_with_defaults

    return decorate


def replace_fields(
    config: ModelConfig, *, attention: LayerFields | None = None, layer: LayerFields | None = None, **model: Any
) -> ModelConfig:
    """A copy of `config` with fields replaced: in the attention of every layer, in every layer, and in the model itself (`model`).

    `attention` and `layer` are dictionaries, or functions from the layer index to a dictionary.
    """

    def fields_of(given: LayerFields | None, i: int) -> dict[str, Any]:
        """The fields to replace in layer number i."""
        return given(i) if callable(given) else given or {}

    layers = []
    for i, old in enumerate(config.layers):
        new_attention = None if old.attention is None else msgspec.structs.replace(old.attention, **fields_of(attention, i))
        layers.append(msgspec.structs.replace(old, **{"attention": new_attention} | fields_of(layer, i)))
    return msgspec.structs.replace(config, layers=tuple(layers), **model)


def value_or(hf: dict[str, Any], key: str, default: Any) -> Any:
    """The value under `key`, or `default` if it is absent or null. 0 and empty values are not replaced."""
    value = hf.get(key)
    return default if value is None else value


def require_values(hf: dict[str, Any], **supported: Any) -> None:
    """Raise CheckpointError for a key whose value is not the one in `supported`. Absent and null values are accepted; 0 is not false."""
    for key, value in supported.items():
        given = hf.get(key)
        if given is not None and (given != value or isinstance(given, bool) != isinstance(value, bool)):
            raise CheckpointError(f"config.json: {key}={shorten(given)} is not supported.", cure=f"Only {key}={shorten(value)} is.")


def read_activation(hf: dict[str, Any], key: str = "hidden_act", default: str = "silu") -> str:
    """The name of the activation function under `key`, as MLPConfig uses it."""
    return ACTIVATIONS[value_or(hf, key, default)]


def read_head_size(hf: dict[str, Any]) -> int:
    """The number of features of one attention head: `head_dim`, or else the hidden size divided by the number of heads."""
    head_size: int | None = hf.get("head_dim")
    return hf["hidden_size"] // hf["num_attention_heads"] if head_size is None else head_size


def read_per_layer(hf: dict[str, Any], key: str, num_layers: int, default: list[Any] | None = None) -> list[Any]:
    """The value of each layer in the list under `key`, or in `default`. A value that is not a list is that of every layer.

    Raises CheckpointError unless there is one value for each layer.
    """
    given = hf[key] if default is None else value_or(hf, key, default)
    values = given if isinstance(given, list) else [given] * num_layers
    if len(values) != num_layers:
        cure = f"It must have one for each of the {num_layers} layers."
        raise CheckpointError(f"config.json: {key} has {len(values)} values.", cure=cure)
    return values


def read_layer_types(
    hf: dict[str, Any],
    default: list[str],
    kinds: tuple[str, ...] = ("sliding_attention", "full_attention"),
    key: str = "layer_types",
) -> list[str]:
    """The kind of each layer under `key`, or else `default`. Raises CheckpointError for one that is not in `kinds`."""
    found = read_per_layer(hf, key, len(default), default)
    check_layer_kinds(key, found, kinds)
    return found


def check_layer_kinds(key: str, found: Iterable[str], kinds: Collection[str]) -> None:
    """Raise CheckpointError for the first kind of a layer, found under `key`, that is not in `kinds`."""
    for kind in found:
        if kind not in kinds:
            raise CheckpointError(f"config.json: {key} has {shorten(kind)}.", cure=f"Supported: {', '.join(kinds)}.")


def read_window_layers(hf: dict[str, Any], num_layers: int) -> list[str]:
    """`read_layer_types` of a family in which every `sliding_window_pattern`-th layer has full attention by default."""
    step = hf["sliding_window_pattern"]
    return read_layer_types(hf, ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(num_layers)])


def read_rope(
    hf: dict[str, Any],
    *,
    dim: int,
    interleaved: bool = False,
    theta: float = 10000.0,
    partial: float | None = None,
    kind: str | None = None,
) -> RopeConfig:
    """The rotary settings in `rope_theta` and `rope_scaling`, or in `rope_parameters` as transformers 5 writes them.

    `dim` is the head size; `theta` and `partial` (the rotated fraction of it) are the family's defaults. A family without `partial` rotates
    whole heads, and a partial_rotary_factor is rejected: transformers ignores it there. `kind` selects one of several sets of parameters:
    sliding_attention or full_attention.
    """
    scaling = value_or(hf, "rope_scaling", value_or(hf, "rope_parameters", {}))
    if kind is not None and kind in scaling:
        scaling = scaling[kind] or {}
    theta = value_or(scaling, "rope_theta", value_or(hf, "rope_theta", theta))
    if partial is None:
        require_values(hf, partial_rotary_factor=1.0)
        require_values(scaling, partial_rotary_factor=1.0)
        fraction = 1.0
    else:
        fraction = value_or(scaling, "partial_rotary_factor", value_or(hf, "partial_rotary_factor", partial))
    return apply_rope_scaling(RopeConfig(dim=int(dim * fraction), theta=float(theta), interleaved=interleaved), scaling, hf)


def apply_rope_scaling(config: RopeConfig, scaling: dict[str, Any], hf: dict[str, Any]) -> RopeConfig:
    """A copy of `config` with the scaling method of `scaling` (rope_scaling). Raises CheckpointError for an unknown method."""
    new_name, old_name = scaling.get("rope_type"), scaling.get("type")
    key, method = ("type", old_name) if new_name is None else ("rope_type", new_name)
    method = "default" if method is None else method
    method = {"su": "longrope"}.get(method, method)
    if method not in METHODS:
        raise CheckpointError(
            f"config.json: {key}={shorten(method)} of the rotary scaling is not supported.",
            cure=f"Supported: {', '.join(METHODS)}.",
        )
    if method == "default":
        return config
    fields: dict[str, Any] = {"scaling": method, "original_max_positions": _original_positions(method, scaling, hf)}
    if method in ("longrope", "yarn") and scaling.get("factor") is None:
        scaling = scaling | {"factor": hf.get("max_position_embeddings", 2048) / fields["original_max_positions"]}
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    fields |= {name: float(scaling[name]) for name in numbers if scaling.get(name) is not None}
    if scaling.get("truncate") is not None:
        fields["truncate"] = bool(scaling["truncate"])
    fields |= {name: tuple(map(float, scaling[name])) for name in ("short_factor", "long_factor") if scaling.get(name)}
    return msgspec.structs.replace(config, **fields)


def _original_positions(method: str, scaling: dict[str, Any], hf: dict[str, Any]) -> int:
    """The context length for which the unscaled frequencies were trained."""
    longest: int = hf.get("max_position_embeddings", 2048)
    if method in ("dynamic", "linear"):
        return longest
    original: int = hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or longest
    return original


def read_max_positions(hf: dict[str, Any], rope: RopeConfig | None, key: str = "max_position_embeddings", default: int = 2048) -> int:
    """The length of the longest supported sequence. For dynamic and yarn scaling, config.json may have the length before scaling."""
    longest: int = value_or(hf, key, default)
    if rope is None or rope.scaling not in ("dynamic", "yarn"):
        return longest
    extended = int(rope.original_max_positions * rope.factor)
    if extended > MAX_POSITIONS:
        raise refused("original_max_position_embeddings × factor", extended, f"it must be at most {MAX_POSITIONS}")
    return max(longest, extended)
