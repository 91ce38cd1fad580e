"""compressed-tensors checkpoints: pack-quantized int4, int-quantized int8 and float-quantized e4m3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import (
    FLOATS,
    check_known_keys,
    check_scales,
    check_tensor,
    check_values,
    dtype_name,
    matrix_shape,
    modules_with,
    read_section,
)
from stoker.builder.prequantized.fp8 import repack_row_scales
from stoker.builder.prequantized.packed_int32 import int4_tensors, supported_group, unpack_int32
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.quant.format import Format
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import GROUP_SIZES, Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.smoothquant import SmoothQuant

# Settings of the search for the values and of runtimes, and copies of what the tensors show.
_KEYS = (
    "quant_method", "config_groups", "kv_cache_scheme", "global_compression_ratio", "ignore", "run_compressed", "version",
    "quantization_status", "dequantize", "use_optimized_inference", "sparsity_config", "transform_config",
)  # fmt: skip
_FORMATS = {"format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", None)}
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations")
_NUMBER_KEYS = (
    "num_bits", "type", "group_size", "block_structure", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
_WEIGHT_VALUES: dict[str, tuple[Any, ...]] = {
    "symmetric": (True, False), "strategy": ("channel", "group", "tensor", None), "dynamic": (False, None),
    "actorder": ("weight", "static", False, None),
}  # fmt: skip
_INPUT_VALUES: dict[str, tuple[Any, ...]] = {
    "symmetric": (True,), "strategy": ("token", "tensor", None), "dynamic": (True, False, None), "actorder": (False, None),
}  # fmt: skip


def read_compressed_tensors(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The pre-quantized weights by name. Raises CheckpointError for unsupported settings, such as several groups of settings."""
    config_groups = list(read_section(quantization, "config_groups").values())
    if len(config_groups) != 1 or not isinstance(config_groups[0], dict):
        raise CheckpointError(
            f"quantization_config: {len(config_groups)} config_groups are not supported.", cure="Use a checkpoint with one."
        )
    weights, inputs = read_section(config_groups[0], "weights"), read_section(config_groups[0], "input_activations")
    _check_settings(quantization, config_groups[0], weights, inputs)
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) == (4, "int") and not inputs:
        return _read_int4(tensors, weights)
    _check_eight_bits(quantization, weights, inputs)
    is_static = bool(inputs) and not inputs.get("dynamic")
    if kind == "float":
        chosen: Format = Fp8(activations="none" if not inputs else "static" if is_static else "token")
    else:
        chosen = SmoothQuant(per_token=not is_static) if inputs else Int8()
    return _read_eight_bits(tensors, chosen, torch.float8_e4m3fn if kind == "float" else torch.int8, is_static)


def _check_settings(quantization: dict[str, Any], group: dict[str, Any], weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Raise CheckpointError for settings that are not known, and for values with another meaning of the tensors or the computation."""
    check_known_keys(quantization, (*_KEYS, *_FORMATS))
    check_values(quantization, _FORMATS)
    check_known_keys(group, (*_GROUP_KEYS, *_FORMATS), "config_groups.")
    check_values(group, _FORMATS, "config_groups.")
    for key, settings, values in (("weights", weights, _WEIGHT_VALUES), ("input_activations", inputs, _INPUT_VALUES)):
        check_known_keys(settings, (*_NUMBER_KEYS, *values), f"config_groups.{key}.")
        check_values(settings, values, f"config_groups.{key}.")
    sparsity, transforms = read_section(quantization, "sparsity_config"), read_section(quantization, "transform_config")
    check_values(sparsity, {"format": ("dense", None)}, "sparsity_config.")
    found = {"output_activations": group.get("output_activations"), "transform_config": transforms.get("config_groups", transforms)}
    if used := [key for key, value in found.items() if value]:
        raise CheckpointError(
            f"quantization_config: {used[0]}={str(found[used[0]])[:60]!r} is not supported.", cure="Use a checkpoint without it."
        )


def _check_eight_bits(quantization: dict[str, Any], weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Raise CheckpointError for settings of 8-bit weights or activations that are not supported."""
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) not in ((8, "int"), (8, "float")) or weights.get("strategy") not in ("channel", "tensor"):
        raise CheckpointError(
            f"quantization_config: {bits}-bit {kind} weights with strategy {weights.get('strategy')!r} are not supported.",
            cure="Use a checkpoint with 4-bit int weights, or 8-bit weights with scales per channel or tensor.",
        )
    if weights.get("symmetric") is False:
        raise CheckpointError(
            "quantization_config: config_groups.weights.symmetric=false of 8 bits is not supported.",
            cure="Use symmetric weights, or 4 bits.",
        )
    if quantization.get("format") == "pack-quantized":
        raise CheckpointError(
            "quantization_config: format='pack-quantized' of 8 bits is not supported.", cure="Use int-quantized, or 4 bits."
        )
    input_bits, input_kind = inputs.get("num_bits", bits), inputs.get("type", kind)
    if inputs and (input_bits, input_kind) != (bits, kind):
        raise CheckpointError(
            f"quantization_config: {input_bits}-bit {input_kind} input_activations of {bits}-bit {kind} weights are not supported.",
            cure="Use a checkpoint whose activations have the type of its weights.",
        )


def _read_eight_bits(
    tensors: Mapping[str, TensorInfo], chosen: Format, dtype: torch.dtype, is_static: bool
) -> dict[str, PrequantizedWeight]:
    """The 8-bit weights by name. A module has `weight` [out, in], `weight_scale` (one, or one per row), and `input_scale` if static."""
    input_suffixes = (".input_scale",) if is_static else ()
    found = {}
    for module in modules_with(tensors, ".weight_scale", (".weight", *input_suffixes)):
        shape = matrix_shape(tensors, f"{module}.weight")
        check_tensor(tensors, f"{module}.weight", shape, dtype)
        sources = (f"{module}.weight", f"{module}.weight_scale", *(module + suffix for suffix in input_suffixes))
        check_scales(tensors, *sources)
        found[f"{module}.weight"] = PrequantizedWeight(sources, shape, chosen, repack_row_scales(shape[0]))
    return found


def _read_int4(tensors: Mapping[str, TensorInfo], weights: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The int4 weights by name.

    A module has `weight_packed` [out, in / 8], `weight_scale` [out, groups], and if not symmetric `weight_zero_point` [out / 8, groups].
    """
    size = weights.get("group_size")
    size = -1 if size is None else size
    if type(size) is not int or (size != -1 and size not in GROUP_SIZES):
        raise CheckpointError(
            f"quantization_config: groups of {size!r} are not supported.", cure=f"Supported: {', '.join(map(str, GROUP_SIZES))}."
        )
    is_asymmetric = weights.get("symmetric") is False
    zero_suffixes = (".weight_zero_point",) if is_asymmetric else ()
    found = {}
    for module in modules_with(tensors, ".weight_packed", (".weight_scale", *zero_suffixes)):
        out_features, words = matrix_shape(tensors, f"{module}.weight_packed")
        in_features = words * 8
        group = in_features if size == -1 else size
        num_groups = -(-in_features // group)
        zero = f"{module}.weight_zero_point"
        check_tensor(tensors, f"{module}.weight_packed", (out_features, words), torch.int32)
        check_tensor(tensors, f"{module}.weight_scale", (out_features, num_groups), *FLOATS)
        if is_asymmetric:
            check_tensor(tensors, zero, (-(-out_features // 8), num_groups), torch.int32)
        scale_dtype = dtype_name(tensors[f"{module}.weight_scale"].dtype)
        chosen = Int4(group_size=supported_group(group), zero="int" if is_asymmetric else "none", scale_dtype=scale_dtype, clip=False)

        def repack(parts: list[Tensor], group: int = group) -> dict[str, Tensor]:
            """The tensors of the engine's int4 format from the packed weight, scales and, if asymmetric, zeros."""
            zeros = unpack_int32(parts[2].t().contiguous()).t() if is_asymmetric else None
            return int4_tensors(unpack_int32(parts[0]), parts[1], zeros, group)

        # weight_shape is not needed, but counts as used.
        shape_tensor = (f"{module}.weight_shape",) if f"{module}.weight_shape" in tensors else ()
        sources = (f"{module}.weight_packed", f"{module}.weight_scale", *((zero,) if is_asymmetric else ()), *shape_tensor)
        found[f"{module}.weight"] = PrequantizedWeight(sources, (out_features, in_features), chosen, repack)
    return found
