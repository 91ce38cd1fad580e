"""Checks of the settings in quantization_config, and of the tensors of a pre-quantized checkpoint against them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.quant.formats.int4 import GROUP_SIZES

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read_bits_and_group(quantization: dict[str, Any], supported_bits: tuple[int, ...]) -> tuple[int, int]:
    """(bits, group size) of an AWQ or GPTQ checkpoint. A group size of -1 means one group per row.

    Raises CheckpointError for values that are not supported.
    """
    bits = quantization.get("bits", quantization.get("w_bit"))
    size = quantization.get("group_size", quantization.get("q_group_size"))
    if type(bits) is not int or bits not in supported_bits or type(size) is not int or (size != -1 and size not in GROUP_SIZES):
        raise CheckpointError(
            f"quantization_config: {str(bits)[:60]} bits in groups of {str(size)[:60]} are not supported.",
            cure=f"Supported: {' or '.join(map(str, supported_bits))} bits in groups of {', '.join(map(str, GROUP_SIZES))}.",
        )
    return bits, size


def read_section(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; empty when it is absent. Raises CheckpointError for a value of another type."""
    section = settings.get(key)
    if section is not None and not isinstance(section, dict):
        raise CheckpointError(f"quantization_config: {key}={section!r:.60} is not an object.", cure=DOWNLOAD_AGAIN)
    return section or {}


def check_known_keys(settings: dict[str, Any], known: tuple[str, ...], section: str = "") -> None:
    """Raise CheckpointError for a key of `settings` that is not in `known`: it might change the meaning of the weights.

    `section` is the path of the settings in quantization_config, for messages.
    """
    unknown = sorted(str(key) for key in settings if key not in known)
    if unknown:
        raise CheckpointError(
            f"quantization_config: {section}{unknown[0][:60]}={str(settings[unknown[0]])[:60]!r} is not known.",
            cure="Remove the key if it has no effect on the weights.",
        )


def check_values(settings: dict[str, Any], supported: Mapping[str, tuple[Any, ...]], section: str = "") -> None:
    """Raise CheckpointError for a setting with a value that is not in `supported`, whose keys may be absent from `settings`.

    Values have the exact types of the supported ones. The case of strings is not significant. `section` is as in `check_known_keys`.
    """
    for key, values in supported.items():
        if key not in settings:
            continue
        value = settings[key].lower() if isinstance(settings[key], str) else settings[key]
        if not any(type(value) is type(one) and value == one for one in values):
            listed = ", ".join("null" if one is None else str(one) for one in values)
            raise CheckpointError(
                f"quantization_config: {section}{key}={str(settings[key])[:60]!r} is not supported.", cure=f"Supported: {listed}."
            )


def modules_with(tensors: Mapping[str, TensorInfo], suffix: str, required: tuple[str, ...]) -> list[str]:
    """The names of all modules that have a tensor `suffix`. Raises CheckpointError when one of them lacks a `required` tensor."""
    modules = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    for module in modules:
        if missing := [part for part in required if module + part not in tensors]:
            raise CheckpointError(f"{module}{missing[0]} is missing, and {module}{suffix} needs it.", cure=DOWNLOAD_AGAIN)
    return modules


def check_tensor(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise CheckpointError unless a tensor has the shape that quantization_config implies, and one of `dtypes`."""
    found = tensors[name]
    if found.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(found.shape)}, and quantization_config implies {list(shape)}.",
            cure="Correct the group or block size in config.json, or download the checkpoint again.",
        )
    if found.dtype not in dtypes:
        expected = " or ".join(map(dtype_name, dtypes))
        raise CheckpointError(f"{name} is {dtype_name(found.dtype)}, and {expected} is expected.", cure=DOWNLOAD_AGAIN)


def check_scales(tensors: Mapping[str, TensorInfo], weight: str, scale: str, *input_scales: str) -> None:
    """Raise CheckpointError unless `scale` has one number, or one per row of `weight`, and each of `input_scales` has one."""
    allowed_counts = {scale: (1, tensors[weight].shape[0])} | dict.fromkeys(input_scales, (1,))
    for name, counts in allowed_counts.items():
        if math.prod(tensors[name].shape) not in counts or tensors[name].dtype not in FLOATS:
            found = f"{list(tensors[name].shape)} {dtype_name(tensors[name].dtype)}"
            raise CheckpointError(f"{name} {found} does not fit {weight} {list(tensors[weight].shape)}.", cure=DOWNLOAD_AGAIN)


def matrix_shape(tensors: Mapping[str, TensorInfo], name: str) -> tuple[int, int]:
    """The shape of a tensor. Raises CheckpointError unless it has two axes and at least one element."""
    shape = tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} has shape {list(shape)}, and a matrix is expected.", cure=DOWNLOAD_AGAIN)
    return shape[0], shape[1]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "float16"."""
    return str(dtype).removeprefix("torch.")
