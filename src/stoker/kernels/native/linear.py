"""Linears of few rows in C, with all that surrounds them. The weight is dense, int8 or int4 and read once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.kernels.native.library import (
    ACTIVATIONS,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GIVEN,
    INT8,
    LINEARS,
    NORMS,
    NOTHING,
    STAYING,
    UINT8,
    WIDENING,
    Known,
    kernels,
    known,
)
from stoker.kernels.reference import linear as reference
from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion

WIDENED = 1 << 18  # numbers of a weight that are widened at once: 1 MiB
FEW_ROWS = 8  # beyond them PyTorch's product is as fast
FEW_GROUPED_ROWS = 16  # beyond them `_widened_product` is: 64 of int4 [3072, 576] take it 1.2 ms and `product` 2.5, 16 take both 0.6
MOST_GROUPS = 1024  # of a row, as in linear.c
FLOATS = (FLOAT32, BFLOAT16, FLOAT16)
STREAM = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # what activations are made of


class Stored(NamedTuple):
    """A weight as the kernel reads it."""

    values: Known
    scale: Known = NOTHING
    zero: Known = NOTHING
    offset: Known = NOTHING
    group: int = 0  # features that share a scale; 0: all of a row


class Link(NamedTuple):
    """A linear as far as it is the same for every call."""

    inputs: int  # features of x
    outputs: int
    packed: bytes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    stored = dense_weight(weight) if x.shape[0] <= FEW_ROWS else None
    y = product(x, stored, bias, fusion) if stored is not None else None
    return reference.linear(x, weight, bias, fusion) if y is None else y


def dense_weight(weight: Tensor) -> Stored | None:
    """None where the kernel does not take it; so for those below."""
    found = known(weight)
    return Stored(found) if found.dtype in (FLOAT32, BFLOAT16) else None


def int8_weight(weight: Tensor, scale: Tensor) -> Stored | None:
    codes, steps = known(weight), known(scale)
    fits = codes.dtype == INT8 and steps.dtype == FLOAT32 and steps.shape == codes.shape[:1]
    return Stored(codes, steps) if fits else None


def grouped_int8_weight(codes: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Stored | None:
    stored = Stored(known(codes), known(scale), NOTHING, known(offset), group)
    return stored if stored.values.dtype == INT8 and _is_grid(stored, 1) else None


def int4_weight(codes: Tensor, scale: Tensor, zero: Tensor | None, offset: Tensor | None, group: int) -> Stored | None:
    stored = Stored(known(codes), known(scale), known(zero), known(offset), group)
    return stored if stored.values.dtype == UINT8 and _is_grid(stored, 2) else None


def _is_grid(stored: Stored, features: int) -> bool:
    """Whether each group of a weight with so many features a byte has its scale, and a zero or offset where there are such."""
    shape, steps, group = stored.values.shape, stored.scale, stored.group
    if len(shape) != 2 or group <= 0 or group % (16 * features):
        return False
    grid = shape[0], -(-features * shape[1] // group)
    fits = grid[1] <= MOST_GROUPS and steps.shape == grid and steps.dtype in FLOATS
    fits = fits and (stored.zero is NOTHING or (stored.zero.shape == grid and stored.zero.dtype == UINT8))
    return fits and (stored.offset is NOTHING or (stored.offset.shape == grid and stored.offset.dtype == steps.dtype))


def link(weight: Stored, bias: Tensor | None, fusion: Fusion) -> Link | None:
    """None where the kernel does not take these. The residual is a call's own."""
    gate, input_gate = ACTIVATIONS.get(fusion.gate, -1), ACTIVATIONS.get(fusion.input_gate, -1)
    if gate < 0 or input_gate < 0 or len(weight.values.shape) != 2:
        return None
    out, size = weight.values.shape
    size *= 2 if weight.values.dtype == UINT8 else 1
    added, norm_weight, norm_bias = known(bias), known(fusion.norm_weight), known(fusion.norm_bias)
    if not (_is_vector(added, out) and _is_vector(norm_weight, size) and _is_vector(norm_bias, size)):
        return None
    out //= 2 if gate else 1
    packed = STAYING(
        weight.values.address, weight.scale.address, weight.zero.address, weight.offset.address,
        added.address, norm_weight.address, norm_bias.address,
        size, out, weight.values.dtype, weight.scale.dtype, weight.group, added.dtype, norm_weight.dtype, norm_bias.dtype,
        NORMS[fusion.norm_kind], input_gate, gate, fusion.norm_eps,
    )  # fmt: skip
    return Link(2 * size if input_gate else size, out, packed)


def product(x: Tensor, weight: Stored, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """The linear by the kernel, or None where it does not take these."""
    found, dtype, residual = kernels(), STREAM.get(x.dtype, -1), fusion.residual
    if isinstance(found, str) or dtype < 0 or x.dim() != 2 or x.stride(1) != 1:
        return None
    own = link(weight, bias, fusion)
    if own is None or x.shape[1] != own.inputs:
        return None
    rows = x.shape[0]
    if residual is not None and not (
        residual.shape == (rows, own.outputs) and residual.dtype == x.dtype and residual.is_contiguous() and residual.is_cpu
    ):
        return None
    y = torch.empty(rows, own.outputs, dtype=x.dtype)
    added = 0 if residual is None else residual.data_ptr()
    head = LINEARS(found.fork, torch.get_num_threads(), 1)
    refused = found.linears(head + GIVEN(x.data_ptr(), added, y.data_ptr(), rows, x.stride(0), dtype) + own.packed)
    return None if refused else y


def grouped_product(x: Tensor, weight: Stored | None, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """The linear with a weight in groups, by the kernel of few rows or by `_widened_product`."""
    if weight is None:
        return None
    return (product if x.shape[0] <= FEW_GROUPED_ROWS else _widened_product)(x, weight, bias, fusion)


def _widened_product(x: Tensor, weight: Stored, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """The linear of many rows with a weight in groups, or None where the kernel does not take these.

    A few of the weight's rows at a time are widened into the second cache, and multiplied there by PyTorch.
    """
    found, own = kernels(), link(weight, None, PLAIN)
    if isinstance(found, str) or own is None or x.shape[-1] != own.inputs * (1 if fusion.input_gate is None else 2):
        return None
    head, part, threads = found.fork, GIVEN(0, 0, 0, 0, 0, FLOAT32) + own.packed, torch.get_num_threads()
    together = max(WIDENED // own.inputs // 16, 1) * 16
    wide = torch.empty(min(together, own.outputs), own.inputs)

    def multiplied(rows: Tensor) -> Tensor:
        rows, y = rows.float(), torch.empty(rows.shape[0], own.outputs)
        for first in range(0, own.outputs, together):
            count = min(together, own.outputs - first)
            refused = found.widen(WIDENING(head, threads, wide.data_ptr(), first, count) + part)
            assert not refused, "_is_grid said that the kernel takes it"
            torch.mm(rows, wide[:count].t(), out=y[:, first : first + count])
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    return around(x, fusion, multiplied)


def _is_vector(found: Known, size: int) -> bool:
    """Whether it is not there, or has a float for each feature."""
    return found is NOTHING or (found.numel == size and found.dtype in FLOATS)
