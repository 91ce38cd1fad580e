"""GGUF block types that a format of `quant/` can store without changing a value.

Layouts: ggml-common.h of github.com/ggml-org/ggml. In each function, `raw` is uint8 [rows, row_bytes], and a field is uint8
[rows, blocks, bytes], with the name that it has in that header: `d` and `m` or `dmin` are float16 scales and offsets of a block, `qs`
quantized values, `ql` and `qh` their low and high bits, and `scales` those of the groups within a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from stoker.builder.checkpoint.gguf.low_bit_blocks import SCALES, as_int4, as_int8, dequantize_blocks
from stoker.quant import groups
from stoker.quant.format import Format
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8_grouped import GroupedInt8

Kind = gguf.GGMLQuantizationType
FLOAT_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16, Kind.F64: torch.float64}


class BlockFormat(NamedTuple):
    """The format that stores one block type, and the function from raw uint8 [rows, row_bytes] to its stored tensors by suffix."""

    format: Format
    repack: Callable[[Tensor], dict[str, Tensor]]


def _split_fields(raw: Tensor, *sizes: int) -> list[Tensor]:
    """The fields of each block of `raw`, each [rows, blocks, size]. `sizes` are in bytes."""
    return list(raw.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1))


def _float16(field: Tensor) -> Tensor:
    """A field [rows, blocks, 2] of bytes as float16 [rows, blocks]."""
    return field.contiguous().view(torch.float16).squeeze(-1)


def _nibbles(field: Tensor) -> Tensor:
    """The nibbles of n bytes, [rows, blocks, 2 × n]: all low nibbles, then all high nibbles."""
    return torch.cat((field & 15, field >> 4), dim=-1)


def _bits(field: Tensor) -> Tensor:
    """The bits of n bytes, [rows, blocks, 8 × n], lowest first."""
    return (field.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q4_0(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q4_0: 32 values of 4 bits with a scale."""
    d, qs = _split_fields(raw, 2, 16)
    return {"weight": groups.pack(_nibbles(qs).flatten(-2)), "scale": _float16(d)}


def _q4_1(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q4_1: 32 values of 4 bits with a scale and an offset."""
    d, m, qs = _split_fields(raw, 2, 2, 16)
    return {"weight": groups.pack(_nibbles(qs).flatten(-2)), "scale": _float16(d), "offset": _float16(m)}


def _q5_0(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q5_0: 32 values of 5 bits with a scale."""
    d, qh, qs = _split_fields(raw, 2, 4, 16)
    return {"weight": (_nibbles(qs) | _bits(qh) << 4).to(torch.int8).sub(16).flatten(-2), "scale": _float16(d)}


def _q5_1(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q5_1: 32 values of 5 bits with a scale and an offset."""
    d, m, qh, qs = _split_fields(raw, 2, 2, 4, 16)
    return {"weight": (_nibbles(qs) | _bits(qh) << 4).to(torch.int8).flatten(-2), "scale": _float16(d), "offset": _float16(m)}


def _q8_0(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q8_0: 32 values of 8 bits with a scale."""
    d, qs = _split_fields(raw, 2, 32)
    return {"weight": qs.contiguous().view(torch.int8).flatten(-2), "scale": _float16(d)}


def _six_bit_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima) of the eight groups of a block, six bits each, as [rows, blocks, 8], from a field of 12 bytes."""
    low, high, rest = scales.split(4, dim=-1)
    scale = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), dim=-1)
    minimum = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), dim=-1)
    return scale, minimum


def _scale_and_offset(d: Tensor, dmin: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The scale and offset of each group of 32: real = stored × d × scale - dmin × minimum."""
    scale, minimum = _six_bit_scales(scales)
    real_scale, real_minimum = _float16(d).float()[..., None] * scale, _float16(dmin).float()[..., None] * minimum
    return {"scale": real_scale.flatten(-2), "offset": -real_minimum.flatten(-2)}


def _q2_k(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q2_K: 16 groups of 16 values of 2 bits with 4-bit scales and minima."""
    scales, qs, d, dmin = _split_fields(raw, 16, 64, 2, 2)
    values = (qs.unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    scale, minimum = _float16(d).float()[..., None] * (scales & 15), _float16(dmin).float()[..., None] * (scales >> 4)
    return {"weight": groups.pack(values.flatten(-4)), "scale": scale.flatten(-2), "offset": -minimum.flatten(-2)}


def _q4_k(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q4_K: 8 groups of 32 values of 4 bits with 6-bit scales and minima."""
    d, dmin, scales, qs = _split_fields(raw, 2, 2, 12, 128)
    values = _nibbles(qs.unflatten(-1, (4, 32))).flatten(-3)
    return {"weight": groups.pack(values)} | _scale_and_offset(d, dmin, scales)


def _q5_k(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q5_K: 8 groups of 32 values of 5 bits with 6-bit scales and minima."""
    d, dmin, scales, qh, qs = _split_fields(raw, 2, 2, 12, 32, 128)
    low_bits = _nibbles(qs.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [rows, blocks, 8, 32]
    high_bit = (qh.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return {"weight": (low_bits | high_bit << 4).to(torch.int8).flatten(-3)} | _scale_and_offset(d, dmin, scales)


def _q6_k(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of Q6_K: 16 groups of 16 values of 6 bits with 8-bit scales."""
    ql, qh, scales, d = _split_fields(raw, 128, 64, 16, 2)
    low_bits = _nibbles(ql.unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [rows, blocks, 2, 4, 32]
    high_bits = (qh.unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    values = (low_bits | high_bits << 4).to(torch.int8).sub(32).flatten(-4)
    return {"weight": values, "scale": (_float16(d).float()[..., None] * scales.contiguous().view(torch.int8)).flatten(-2)}


def _mxfp4(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of MXFP4: 32 values of FP4 with a scale that is a power of two."""
    e, qs = _split_fields(raw, 1, 16)
    return {"weight": groups.pack(_nibbles(qs).flatten(-2)), "scale": e.squeeze(-1).contiguous()}


def _nvfp4(raw: Tensor) -> dict[str, Tensor]:
    """Stored tensors of NVFP4: 4 groups of 16 values of FP4 with e4m3 scales, in which bytes without a number (0x7f) stand for 0."""
    d, qs = _split_fields(raw, 4, 32)
    scale = (d & 0x7F).flatten(-2)
    scale = torch.where(scale == 0x7F, 0, scale).to(torch.uint8).view(torch.float8_e4m3fn)
    values = _nibbles(qs.unflatten(-1, (4, 8))).flatten(-3)
    return {"weight": groups.pack(values), "scale": scale, "row_scale": torch.ones(len(raw))}


# Types whose values fit into four bits, if they are stored as integers; the others of `SCALES` need eight.
_IN_FOUR_BITS = (Kind.Q3_K, Kind.TQ1_0, Kind.TQ2_0)

PREQUANTIZED_BLOCKS: dict[Kind, BlockFormat] = {
    Kind.MXFP4: BlockFormat(Fp4(), _mxfp4),
    Kind.NVFP4: BlockFormat(Fp4(group_size=16, scale="e4m3"), _nvfp4),
    Kind.Q2_K: BlockFormat(Int4(group_size=16, zero="float", scale_dtype="float32", clip=False), _q2_k),
    Kind.Q4_0: BlockFormat(Int4(group_size=32, zero="none", clip=False), _q4_0),
    Kind.Q4_1: BlockFormat(Int4(group_size=32, zero="float", clip=False), _q4_1),
    Kind.Q4_K: BlockFormat(Int4(group_size=32, zero="float", scale_dtype="float32", clip=False), _q4_k),
    Kind.Q5_0: BlockFormat(GroupedInt8(group_size=32, scale_dtype="float16"), _q5_0),
    Kind.Q5_1: BlockFormat(GroupedInt8(group_size=32, scale_dtype="float16", shifted=True), _q5_1),
    Kind.Q5_K: BlockFormat(GroupedInt8(group_size=32, shifted=True), _q5_k),
    Kind.Q6_K: BlockFormat(GroupedInt8(group_size=16), _q6_k),
    Kind.Q8_0: BlockFormat(GroupedInt8(group_size=32, scale_dtype="float16"), _q8_0),
} | {
    kind: BlockFormat(Int4(group_size=group, zero="none", scale_dtype="float32", clip=False), as_int4(kind))
    if kind in _IN_FOUR_BITS
    else BlockFormat(GroupedInt8(group_size=group), as_int8(kind))
    for kind, (_, group) in SCALES.items()
}  # fmt: skip

# Types of four bits or fewer that are stored in eight: no kernel multiplies by their tables of values.
WIDENED_BLOCKS = tuple(kind for kind in SCALES if kind not in (*_IN_FOUR_BITS, Kind.Q8_K))
SUPPORTED_KINDS = frozenset(FLOAT_DTYPES) | frozenset(PREQUANTIZED_BLOCKS)


def dequantize_rows(raw: np.ndarray, kind: Kind) -> Tensor:
    """Convert raw rows uint8 [rows, row_bytes] to [rows, columns], in the tensor's dtype or, for quantized blocks, float32."""
    if kind in FLOAT_DTYPES:
        return torch.from_numpy(raw).view(FLOAT_DTYPES[kind])
    return torch.from_numpy(dequantize_blocks(raw, kind))
