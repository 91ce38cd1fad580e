"""Weights of TensorRT-LLM in integers: W8A16 and W4A16 with a scale per output feature, W4A16_GPTQ and W8A16_GPTQ in groups.

`TensorRTLLMWeights` has merged the ranks and put values in order. A module has `weight`, signed int8 [out, in], `weight_scale`
[out, groups], and for GPTQ `weight_zero` [out, groups], so that real = weight × scale + zero. Ranks that share a weight along its input
features have scales of their own, which are groups, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import FLOATS, check_tensor, dtype_name, matrix_shape
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.quant.formats.int4 import GROUP_SIZES, Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8
from stoker.quant.groups import largest_group_size, pack

_LARGEST_GROUP = 128  # in the engine, of a scale for more input features
_ROUNDING = 0.3  # of a unit: the error of zero / scale in bfloat16, whose largest magnitude is 128


def read_integers(tensors: Mapping[str, TensorInfo], module: str, bits: int) -> PrequantizedWeight:
    """The weight of a module with values of `bits` bits. Raises CheckpointError for tensors that do not fit together."""
    weight, scale, zero = (f"{module}.{suffix}" for suffix in ("weight", "weight_scale", "weight_zero"))
    rows, columns = matrix_shape(tensors, weight)
    check_tensor(tensors, weight, (rows, columns), torch.int8)
    num_groups = tensors[scale].shape[1] if len(tensors[scale].shape) == 2 else 1
    has_zero = zero in tensors
    for name in (scale, zero)[: 1 + has_zero]:
        check_tensor(tensors, name, (rows, num_groups) if len(tensors[name].shape) == 2 else (rows,), *FLOATS)
    if columns % num_groups or (num_groups > 1 and columns // num_groups % GROUP_SIZES[0]):
        raise CheckpointError(f"{scale} has {num_groups} groups, which {columns} input features do not divide into.", cure=DOWNLOAD_AGAIN)
    group = columns // num_groups
    sources = (weight, scale, zero) if has_zero else (weight, scale)
    chosen = _choose_format(bits, group, num_groups, has_zero, tensors[scale].dtype)

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of the format."""
        values, scales = parts[0], parts[1].reshape(rows, num_groups)
        if isinstance(chosen, Int8):
            return {"weight": values, "scale": scales[:, 0].float().contiguous()}
        units = _zero_units(zero, parts[2], scales) if has_zero else None
        offset = None if units is None else units * scales.float()
        repeats = -(-group // chosen.group_size)

        def regroup(per_group: Tensor) -> Tensor:
            """The scales of the groups of the format, which divide those of the checkpoint."""
            return per_group.repeat_interleave(repeats, 1)[:, : -(-columns // chosen.group_size)].contiguous()

        if isinstance(chosen, Int4):  # (value + 8 − (8 − units)) × scale
            stored = {"weight": pack(values + 8), "scale": regroup(scales)}
            return stored if units is None else stored | {"zero": regroup((8 - units).to(torch.uint8))}
        stored = {"weight": values, "scale": regroup(scales.float())}
        return stored if offset is None else stored | {"offset": regroup(offset)}

    return PrequantizedWeight(sources, (rows, columns), chosen, repack)


def _choose_format(bits: int, group: int, num_groups: int, has_zero: bool, scale_dtype: torch.dtype) -> Int4 | Int8 | GroupedInt8:
    """The format that stores a weight exactly."""
    if bits == 8 and num_groups == 1 and not has_zero:
        return Int8()
    size = group if has_zero and group in GROUP_SIZES else largest_group_size(GROUP_SIZES, _LARGEST_GROUP, group)
    if bits == 8:
        return GroupedInt8(group_size=size, scale_dtype="float32", shifted=has_zero)
    return Int4(group_size=size, zero="int" if has_zero else "none", scale_dtype=dtype_name(scale_dtype), clip=False)


def _zero_units(name: str, zero: Tensor, scale: Tensor) -> Tensor:
    """`zero` / `scale` as whole numbers. TensorRT-LLM multiplied the zero points of GPTQ by the scales, and rounded to 16 bits.

    Raises CheckpointError for a zero that is no multiple of its scale.
    """
    exact = torch.where(scale == 0, 0.0, zero.float() / scale.float())
    units = exact.round()
    if bool(((exact - units).abs() > _ROUNDING).any()) or bool((units.abs() > 128).any()):
        raise CheckpointError(f"{name} is not a multiple of its scale, as the zero points of GPTQ are.", cure=DOWNLOAD_AGAIN)
    return units
