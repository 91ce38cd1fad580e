"""What the readers of quantized checkpoints share: the value that they make, and checks of tensors against quantization_config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import FETCH, Stored
from stoker.quant.format import Format
from stoker.quant.int4 import GROUP_SIZES

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Kept:
    """A weight [out, in] of `shape` that `take` makes of the tensors `sources`, as `format` stores it."""

    sources: tuple[str, ...]
    shape: tuple[int, int]
    format: Format
    take: Callable[[list[Tensor]], dict[str, Tensor]]


def bits_and_group(quantization: dict[str, Any], allowed: tuple[int, ...]) -> tuple[int, int]:
    """(bits, group size; -1: one group a row)."""
    bits = quantization.get("bits", quantization.get("w_bit"))
    size = quantization.get("group_size", quantization.get("q_group_size"))
    if type(bits) is not int or bits not in allowed or type(size) is not int or (size != -1 and size not in GROUP_SIZES):
        raise CheckpointError(
            f"quantization_config: {bits!r} bits in groups of {size!r} are not read.",
            cure=f"Read are {' or '.join(map(str, allowed))} bits in groups of {', '.join(map(str, GROUP_SIZES))}.",
        )
    return bits, size


def stems(stored: Mapping[str, Stored], suffix: str, needed: tuple[str, ...]) -> list[str]:
    """Modules that have a tensor `suffix`; all must have those `needed` too."""
    stems = [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]
    for stem in stems:
        if missing := [part for part in needed if stem + part not in stored]:
            raise CheckpointError(f"{stem}{missing[0]} is missing beside {stem}{suffix}.", cure=FETCH)
    return stems


def check(stored: Mapping[str, Stored], name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise CheckpointError unless tensor `name` has the shape that quantization_config implies, and one of `dtypes`."""
    found = stored[name]
    if found.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(found.shape)}, and quantization_config asks for {list(shape)}.",
            cure="Correct the group or block size in config.json, or download the checkpoint again.",
        )
    if found.dtype not in dtypes:
        wanted = " or ".join(map(dtype_name, dtypes))
        raise CheckpointError(f"{name} is {dtype_name(found.dtype)}, and {wanted} is expected.", cure=FETCH)


def matrix(stored: Mapping[str, Stored], name: str) -> tuple[int, int]:
    """The shape of tensor `name`. Raises CheckpointError unless it has two axes."""
    shape = stored[name].shape
    if len(shape) != 2:
        raise CheckpointError(f"{name} has shape {list(shape)}, and a matrix is expected.", cure=FETCH)
    return shape[0], shape[1]


def settings(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """The settings under `key`, if any. Raises CheckpointError when something else is there."""
    found = holder.get(key)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"quantization_config: {key}={found!r} is not an object.", cure=FETCH)
    return found or {}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
