"""GGUF blocks that a format of quant/ holds as they are. Layouts: ggml-common.h of github.com/ggml-org/ggml."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import torch
from torch import Tensor

from stoker.quant import groups
from stoker.quant.format import Format
from stoker.quant.int4 import Int4
from stoker.quant.int8_grouped import GroupedInt8

Kind = gguf.GGMLQuantizationType


class Blocks(NamedTuple):
    """How blocks of one kind are taken over: raw uint8 [rows, bytes] → stored tensors of `format`."""

    format: Format
    take: Callable[[Tensor], dict[str, Tensor]]


def _split(raw: Tensor, *sizes: int) -> list[Tensor]:
    """The fields of each block, uint8 [rows, blocks, size]."""
    return list(raw.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1))


def _half(field: Tensor) -> Tensor:
    """float16 [rows, blocks] of two bytes."""
    return field.contiguous().view(torch.float16).squeeze(-1)


def _halves(codes: Tensor) -> Tensor:
    """Nibbles [rows, blocks, 2 × n] of n bytes: all low ones, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _bits(field: Tensor) -> Tensor:
    """Bits [rows, blocks, 8 × n] of n bytes, the lowest first."""
    return (field.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q4_0(raw: Tensor) -> dict[str, Tensor]:
    d, codes = _split(raw, 2, 16)
    return {"weight": groups.pack(_halves(codes).flatten(-2)), "scale": _half(d)}


def _q4_1(raw: Tensor) -> dict[str, Tensor]:
    d, m, codes = _split(raw, 2, 2, 16)
    return {"weight": groups.pack(_halves(codes).flatten(-2)), "scale": _half(d), "offset": _half(m)}


def _q5_0(raw: Tensor) -> dict[str, Tensor]:
    d, high, codes = _split(raw, 2, 4, 16)
    return {"weight": (_halves(codes) | _bits(high) << 4).to(torch.int8).sub(16).flatten(-2), "scale": _half(d)}


def _q5_1(raw: Tensor) -> dict[str, Tensor]:
    d, m, high, codes = _split(raw, 2, 2, 4, 16)
    return {"weight": (_halves(codes) | _bits(high) << 4).to(torch.int8).flatten(-2), "scale": _half(d), "offset": _half(m)}


def _q8_0(raw: Tensor) -> dict[str, Tensor]:
    d, codes = _split(raw, 2, 32)
    return {"weight": codes.contiguous().view(torch.int8).flatten(-2), "scale": _half(d)}


def _scales_k(field: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima) of eight groups, six bits each, from 12 bytes [rows, blocks, 12] → [rows, blocks, 8]."""
    low, high, both = field.split(4, dim=-1)
    scale = torch.cat((low & 63, (both & 15) | (low >> 6 << 4)), dim=-1)
    least = torch.cat((high & 63, (both >> 4) | (high >> 6 << 4)), dim=-1)
    return scale, least


def _affine_k(d: Tensor, least: Tensor, scales: Tensor) -> dict[str, Tensor]:
    scale, minimum = _scales_k(scales)
    wide, low = _half(d).float()[..., None] * scale, _half(least).float()[..., None] * minimum
    return {"scale": wide.flatten(-2), "offset": -low.flatten(-2)}


def _q4_k(raw: Tensor) -> dict[str, Tensor]:
    d, least, scales, codes = _split(raw, 2, 2, 12, 128)
    found = _halves(codes.unflatten(-1, (4, 32))).flatten(-3)
    return {"weight": groups.pack(found)} | _affine_k(d, least, scales)


def _q5_k(raw: Tensor) -> dict[str, Tensor]:
    d, least, scales, high, codes = _split(raw, 2, 2, 12, 32, 128)
    found = _halves(codes.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [rows, blocks, 8, 32]
    fifth = (high.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return {"weight": (found | fifth << 4).to(torch.int8).flatten(-3)} | _affine_k(d, least, scales)


def _q6_k(raw: Tensor) -> dict[str, Tensor]:
    low, high, scales, d = _split(raw, 128, 64, 16, 2)
    first = _halves(low.unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [rows, blocks, 2, 4, 32]
    last = (high.unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    codes = (first | last << 4).to(torch.int8).sub(32).flatten(-4)
    return {"weight": codes, "scale": (_half(d).float()[..., None] * scales.contiguous().view(torch.int8)).flatten(-2)}


KEPT: dict[Kind, Blocks] = {
    Kind.Q4_0: Blocks(Int4(group_size=32, zero="none", clip=False), _q4_0),
    Kind.Q4_1: Blocks(Int4(group_size=32, zero="float", clip=False), _q4_1),
    Kind.Q4_K: Blocks(Int4(group_size=32, zero="float", scale_dtype="float32", clip=False), _q4_k),
    Kind.Q5_0: Blocks(GroupedInt8(group_size=32, scale_dtype="float16"), _q5_0),
    Kind.Q5_1: Blocks(GroupedInt8(group_size=32, scale_dtype="float16", shifted=True), _q5_1),
    Kind.Q5_K: Blocks(GroupedInt8(group_size=32, shifted=True), _q5_k),
    Kind.Q6_K: Blocks(GroupedInt8(group_size=16), _q6_k),
    Kind.Q8_0: Blocks(GroupedInt8(group_size=32, scale_dtype="float16"), _q8_0),
}
