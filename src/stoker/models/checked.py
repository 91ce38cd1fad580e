"""A config.json is believed only within bounds: what it makes of a model is checked before anything is sized by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from stoker.base.errors import CheckpointError
from stoker.core.model_config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig, decode, encode
from stoker.models.architecture import Architecture

MAX_LAYERS = 4096
MAX_SIZE = 1 << 18  # of a width or a count: the product of any three is a number of bytes that fits 64 bits
_POSITIONS = ("max_positions", "learned_positions", "block_positions", "original_max_positions", "logn_length", "window", "chunk")
_LARGER = {"vocab_size": 1 << 24} | dict.fromkeys((*_POSITIONS, "start_id"), 1 << 31)
_ABOVE_ZERO = ("softcap", "logit_softcap", "theta", "factor", "clip_qkv", "alibi_max")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_CURE = "Correct config.json, or download it again."


def read_config(row: Architecture, hf: dict[str, Any]) -> ModelConfig:
    """The model that config.json's data describes. Raises CheckpointError for a key that is missing, and for values of a wrong type or
    size."""
    for key in _DEPTHS:
        if type(depth := hf.get(key)) is int and not 1 <= depth <= MAX_LAYERS:
            raise _refused(key, depth, f"a model has 1 to {MAX_LAYERS} layers")
    try:
        config = decode(encode(row.config(hf)))
    except KeyError as problem:
        raise CheckpointError(f"config.json has no {problem}.", cure=_CURE) from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as problem:
        raise CheckpointError(f"config.json has a wrong value ({problem}).", cure=_CURE) from None
    check_config(config)
    return config


def check_config(config: ModelConfig) -> None:
    """Raise CheckpointError naming a field, its value and its limit unless every number is in its range and they fit together."""
    for part in _parts(config):
        for field in msgspec.structs.fields(part):
            _check_number(field, getattr(part, field.name))
        if isinstance(part, RopeConfig):
            _check_rope(part)
        elif isinstance(part, AttentionConfig):
            _check_heads(part)
        elif isinstance(part, MoEConfig):
            _check_experts(part)


def _parts(config: ModelConfig) -> Iterator[msgspec.Struct]:
    """The config and every different value in it."""
    todo: list[Any] = [config]
    seen: set[msgspec.Struct] = set()
    while todo:
        part = todo.pop()
        if isinstance(part, tuple):
            todo += dict.fromkeys(part)
        elif isinstance(part, msgspec.Struct) and part not in seen:
            seen.add(part)
            todo += [getattr(part, name) for name in part.__struct_fields__]
            yield part


def _check_number(field: Any, value: Any) -> None:
    name = field.name
    if type(value) is int:
        low, high = int(field.default != 0 and name != "start_id"), _LARGER.get(name, MAX_SIZE)
        if not low <= value <= high:
            raise _refused(name, value, f"a whole number from {low} to {high} belongs there")
    elif type(value) is float and (not math.isfinite(value) or (name == "eps" and value < 0) or (name in _ABOVE_ZERO and value <= 0)):
        raise _refused(name, value, "a finite number above 0 belongs there" if name in _ABOVE_ZERO else "a finite number belongs there")


def _check_rope(rope: RopeConfig) -> None:
    if rope.dim % 2:
        raise _refused("rotary dimensions", rope.dim, "features turn in pairs")
    for name in ("short_factor", "long_factor") if rope.scaling == "longrope" else ():
        factors = getattr(rope, name)
        if len(factors) != rope.dim // 2 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise _refused(name, f"{len(factors)} numbers", f"{rope.dim // 2} above 0 belong there, one for each pair that turns")


def _check_heads(attention: AttentionConfig) -> None:
    if attention.num_heads % attention.num_kv_heads:
        raise _refused("num_kv_heads", attention.num_kv_heads, f"it must divide the {attention.num_heads} heads")
    if attention.rope is not None and attention.rope.dim > attention.head_size:
        raise _refused("rotary dimensions", attention.rope.dim, f"a head has {attention.head_size} features")


def _check_experts(moe: MoEConfig) -> None:
    if moe.score not in ("softmax", "sigmoid", "softmax_topk"):
        raise _refused("score", moe.score, "experts are scored by softmax or sigmoid")
    if moe.num_experts % moe.num_groups:
        raise _refused("num_groups", moe.num_groups, f"it must divide the {moe.num_experts} experts")
    for name, most in (("top_groups", moe.num_groups), ("top_k", moe.num_experts * moe.top_groups // moe.num_groups)):
        if getattr(moe, name) > most:
            raise _refused(name, getattr(moe, name), f"at most {most} can be chosen")


def _refused(name: str, value: object, limit: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name}={value} is refused: {limit}.", cure=_CURE)
