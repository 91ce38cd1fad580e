"""Linears with group-wise int4 weights in plain PyTorch; up to 96 rows use PyTorch's packed CPU kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.linear import around
from stoker.kernels.reference.quant_int8 import widen_groups
from stoker.kernels.types import PLAIN, Fusion

# Activation rows up to which the packed kernel is faster: with a weight [3072, 576], 128 rows need 7 ms in it; widening the weight needs
# 3 ms and the product after it 4 ms.
_MAX_PACKED_ROWS = 96
_PACKED_GROUPS = (128, 64, 32)
_PACKED_BLOCK = 64  # weight rows per block of the packed format
# The values of FP4 e2m1 by their four bits (OCP Microscaling Formats 1.0, table 5).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an int4 weight (`ops.packed_linear`)."""

    def product(rows: Tensor) -> Tensor:
        """Multiply by PyTorch's packed kernel for up to _MAX_PACKED_ROWS rows, otherwise by the dequantized weight."""
        if weight.device_data is None or rows.shape[0] > _MAX_PACKED_ROWS:
            return F.linear(rows, dequantize_int4(weight, rows.dtype), weight.bias)
        packed, scales, group = weight.device_data
        # In bfloat16: the kernel has no vector code for float32 activations, which are 20 times as slow.
        out = torch._weight_int4pack_mm_for_cpu(rows.to(torch.bfloat16).contiguous(), packed, group, scales)
        if out.shape[1] != weight.out_features:
            out = out[:, : weight.out_features]
        out = out.to(rows.dtype)
        return out if weight.bias is None else out + weight.bias

    return around(x, fusion, product)


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """Add the tensors of PyTorch's CPU kernel as `device_data` (`ops.prepare_weight`). FP4 weights, which it lacks, are unchanged.

    These are the values in PyTorch's own order, and bfloat16 [groups, N, 2]: the scale, and the real value of the stored value 8.
    """
    rows, size = weight.out_features, weight.in_features
    group = next((g for g in _PACKED_GROUPS if size % g == 0 and weight.group_size % g == 0), None)
    if weight.values.device.type != "cpu" or group is None or weight.is_fp4:
        return weight
    more = -rows % _PACKED_BLOCK
    packed = torch.empty(rows + more, size // 2, dtype=torch.uint8)
    for start in range(0, rows, _PACKED_BLOCK):  # block by block: the input has four bytes per value, eight times the output
        values = unpack(weight.values[start : start + _PACKED_BLOCK]).int()
        block = F.pad(values, (0, 0, 0, _PACKED_BLOCK - values.shape[0]))
        packed[start : start + _PACKED_BLOCK] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(block, 1)
    scale, low = affine(weight)
    pair = torch.stack((scale, low + 8 * scale), dim=-1)
    pair = pair.repeat_interleave(weight.group_size // group, dim=1)[:, : size // group]
    pair = F.pad(pair, (0, 0, 0, 0, 0, more)).transpose(0, 1).to(torch.bfloat16).contiguous()
    return replace(weight, device_data=(packed, pair, group))


def affine(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """(scale, low) of integers, both float32 [N, groups]. The real value of a stored value q is q × scale + low."""
    assert weight.scale is not None
    scale = weight.scale.float()
    if weight.zero is None:
        return scale, -8.0 * scale
    return scale, weight.zero.float() if weight.zero_kind == "float" else -weight.zero.float() * scale


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K]: the 4-bit values of `packed` [..., K / 2].

    The low half of a byte is an even feature, the high half the odd one after it.
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def fp4_as_int8(weight: PackedWeight) -> PackedWeight:
    """An FP4 weight with the layout `stored` as int8 in groups of float32 scales: twice each value is a whole number within ± 12."""
    assert weight.is_fp4 and weight.scale is not None
    doubled = torch.tensor([int(2 * value) for value in FP4_VALUES], dtype=torch.int8)
    values = doubled.to(weight.values.device)[unpack(weight.values).int()]
    scale = weight.scale.float() if weight.row_scale is None else weight.scale.float() * weight.row_scale[..., None]
    return replace(weight, format="int8", values=values, scale=scale / 2, is_fp4=False, row_scale=None)


def dequantize_int4(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dequantized weight [N, K] in `dtype`, [E, N, K] for stacked experts in FP4. The weight must have the layout `stored`."""
    if weight.is_fp4:
        return widen_groups(fp4_as_int8(weight)).to(dtype)
    values, (scale, low) = unpack(weight.values), affine(weight)
    rows, size = values.shape
    ragged = -size % weight.group_size
    wide = F.pad(values, (0, ragged)).view(rows, -1, weight.group_size).float()
    return wide.mul_(scale[..., None]).add_(low[..., None]).view(rows, -1)[:, :size].to(dtype)
