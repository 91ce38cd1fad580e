"""Reads the config.json of a checkpoint, and checks every size before anything is allocated by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from stoker.base.errors import CheckpointError, first_line, shorten
from stoker.core.model_config import (
    AttentionConfig,
    DeltaNetConfig,
    Mamba2Config,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    decode_model,
    encode_model,
)
from stoker.models.architecture import Architecture
from stoker.models.config_data import ConfigData, check_all_keys_used
from stoker.models.config_fields import require_values, value_or
from stoker.models.config_values import CURE, MAX_POSITIONS, MAX_SIZE, MAX_VOCAB, refused

_POSITION_FIELDS = (
    "max_positions",
    "learned_positions",
    "block_positions",
    "original_max_positions",
    "logn_length",
    "window",
    "chunk",
    "interval",
)
_MAX_BY_FIELD = dict.fromkeys(("vocab_size", "input_vocab"), MAX_VOCAB) | dict.fromkeys((*_POSITION_FIELDS, "start_id"), MAX_POSITIONS)
_INDEX_FIELDS = ("start_id", "kv_layer")  # which may be 0
_POSITIVE_FIELDS = ("softcap", "logit_softcap", "theta", "factor", "clip_qkv", "alibi_max")


def read_model_config(row: Architecture, hf: dict[str, Any], ignored_keys: tuple[str, ...] = ()) -> ModelConfig:
    """Convert the data of a config.json into a checked ModelConfig.

    `ignored_keys` are fnmatch patterns of keys that the caller declares to have no effect. Raises CheckpointError for a missing key, a
    value of the wrong type, a value that is out of range, and a key that is neither used nor known to have no effect.
    """
    try:
        data = ConfigData(hf, row.kinds)
        for part in (data, value_or(data, "text_config", {})):
            require_values(part, is_encoder_decoder=False, add_cross_attention=False)
        config = decode_model(encode_model(row.read_config(data)))  # the round trip checks the type of every field
    except RecursionError:
        raise CheckpointError("config.json has objects nested too deeply.", cure=CURE) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:  # each value alone is possible
        reason = shorten(first_line(problem))
        raise CheckpointError(f"config.json has values that do not fit together in {row.name}: {reason}.", cure=CURE) from None
    check_all_keys_used(data, row.name, (*row.ignored_keys, *ignored_keys))
    check_model_config(config)
    return config


def check_model_config(config: ModelConfig) -> None:
    """Check that every number is in range, and that the sizes of attention, rotary embeddings and experts are consistent.

    Raises CheckpointError naming the field, its value and its limit.
    """
    for part in _config_parts(config):
        for field in _fields_of(type(part)):
            _check_number(field, getattr(part, field.name))
        if isinstance(part, RopeConfig):
            _check_rope(part)
        elif isinstance(part, AttentionConfig):
            _check_heads(part)
        elif isinstance(part, MoEConfig):
            _check_experts(part)
        elif isinstance(part, Mamba2Config | DeltaNetConfig):
            _check_state_heads(part)


@cache
def _fields_of(struct: type[msgspec.Struct]) -> tuple[Any, ...]:
    """The fields of a class. msgspec compiles its annotations in each call, which took 7 ms for a model."""
    return msgspec.structs.fields(struct)


def _config_parts(config: ModelConfig) -> Iterator[msgspec.Struct]:
    """The config and all structs nested in it. Equal structs, such as identical layers, are yielded once."""
    pending: list[Any] = [config]
    seen: set[msgspec.Struct] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending += dict.fromkeys(part)
        elif isinstance(part, msgspec.Struct) and part not in seen:
            seen.add(part)
            pending += [getattr(part, name) for name in part.__struct_fields__]
            yield part


def _check_number(field: Any, value: Any) -> None:
    """Raise CheckpointError if a field's number is out of range."""
    name = field.name
    if type(value) is int:
        low, high = int(field.default != 0 and name not in _INDEX_FIELDS), _MAX_BY_FIELD.get(name, MAX_SIZE)
        if not low <= value <= high:
            raise refused(name, value, f"it must be a whole number from {low} to {high}")
    elif type(value) is float:
        is_positive, is_eps = name in _POSITIVE_FIELDS, name == "eps"
        if not math.isfinite(value) or (is_eps and value < 0) or (is_positive and value <= 0):
            bound = " above 0" if is_positive else " of at least 0" if is_eps else ""
            raise refused(name, value, f"it must be a finite number{bound}")


def _check_rope(rope: RopeConfig) -> None:
    """Raise CheckpointError for inconsistent rotary settings."""
    if rope.dim % 2:
        raise refused("rotary dimensions", rope.dim, "features are rotated in pairs")
    for name in ("short_factor", "long_factor") if rope.scaling == "longrope" else ():
        factors = getattr(rope, name)
        if len(factors) != rope.dim // 2 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise refused(name, f"{len(factors)} numbers", f"longrope needs {rope.dim // 2} numbers above 0, one per rotated pair")


def _check_heads(attention: AttentionConfig) -> None:
    """Raise CheckpointError for inconsistent numbers and sizes of heads."""
    if attention.num_heads % attention.num_kv_heads:
        raise refused("num_kv_heads", attention.num_kv_heads, f"it must divide the {attention.num_heads} heads")
    if attention.rope is not None and attention.rope.dim > attention.head_size:
        raise refused("rotary dimensions", attention.rope.dim, f"a head has {attention.head_size} features")


def _check_state_heads(state: Mamba2Config | DeltaNetConfig) -> None:
    """Raise CheckpointError for groups of different numbers of heads of a recurrent state, or of features of its norm."""
    if state.num_heads % state.key_heads:
        name = "num_groups" if isinstance(state, Mamba2Config) else "key_heads"
        raise refused(name, state.key_heads, f"it must divide the {state.num_heads} heads of the state")
    if isinstance(state, Mamba2Config) and state.inner_size % state.norm_groups:
        raise refused("norm_groups", state.norm_groups, f"it must divide the {state.inner_size} features of the state")


def _check_experts(moe: MoEConfig) -> None:
    """Raise CheckpointError for inconsistent numbers of experts and groups."""
    if moe.score not in ("softmax", "sigmoid", "softmax_topk", "sparsemixer"):
        raise refused("score", moe.score, "experts are scored by softmax or sigmoid")
    if moe.num_experts % moe.num_groups:
        raise refused("num_groups", moe.num_groups, f"it must divide the {moe.num_experts} experts")
    for name, most in (("top_groups", moe.num_groups), ("top_k", moe.num_experts * moe.top_groups // moe.num_groups)):
        if getattr(moe, name) > most:
            raise refused(name, getattr(moe, name), f"at most {most} can be chosen")
