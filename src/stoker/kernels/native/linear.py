"""Linears of few rows in C, with all that surrounds them. The weight is dense, int8 or int4 and read once."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.native.library import (
    ACTIVATIONS,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    LINEAR,
    NORMS,
    NOTHING,
    UINT8,
    Known,
    kernels,
    known,
)
from stoker.kernels.quantized import Int4Weight
from stoker.kernels.reference import linear as reference
from stoker.kernels.types import PLAIN, Fusion

FEW_ROWS = 8  # beyond them PyTorch's product is as fast
FLOATS = (FLOAT32, BFLOAT16, FLOAT16)
STREAM = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # what activations are made of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    if x.shape[0] <= FEW_ROWS:
        found = known(weight)
        if found.dtype in (FLOAT32, BFLOAT16):
            y = _product(x, found, bias, fusion, NOTHING, NOTHING, NOTHING, 0)
            if y is not None:
                return y
    return reference.linear(x, weight, bias, fusion)


def int8_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """`int8_linear` by the kernel, or None where it does not take these."""
    codes, steps = known(weight), known(scale)
    if codes.dtype != INT8 or steps.dtype != FLOAT32 or steps.shape != codes.shape[:1]:
        return None
    return _product(x, codes, bias, fusion, steps, NOTHING, NOTHING, 0)


def int4_product(x: Tensor, weight: Int4Weight, bias: Tensor | None, fusion: Fusion) -> Tensor | None:
    """`int4_linear` by the kernel, or None where it does not take these."""
    codes, scale, zero, offset = known(weight.codes), known(weight.scale), known(weight.zero), known(weight.offset)
    group = weight.group_size
    if codes.dtype != UINT8 or len(codes.shape) != 2 or group <= 0 or group % 32:
        return None
    grid = codes.shape[0], -(-2 * codes.shape[1] // group)
    fits = scale.shape == grid and scale.dtype in FLOATS
    fits = fits and (zero is NOTHING or (zero.shape == grid and zero.dtype == UINT8))
    fits = fits and (offset is NOTHING or (offset.shape == grid and offset.dtype == scale.dtype))
    return _product(x, codes, bias, fusion, scale, zero, offset, group) if fits else None


def _product(
    x: Tensor, weight: Known, bias: Tensor | None, fusion: Fusion, scale: Known, zero: Known, offset: Known, group: int
) -> Tensor | None:
    """`scale`, `zero` and `offset` fit the weight; the rest is checked here."""
    found = kernels()
    dtype, shape = STREAM.get(x.dtype, -1), x.shape
    gate, input_gate = ACTIVATIONS.get(fusion.gate, -1), ACTIVATIONS.get(fusion.input_gate, -1)
    if isinstance(found, str) or dtype < 0 or gate < 0 or input_gate < 0 or len(shape) != 2 or len(weight.shape) != 2:
        return None
    out, size = weight.shape
    size *= 2 if group else 1
    added, norm_weight, norm_bias = known(bias), known(fusion.norm_weight), known(fusion.norm_bias)
    if (
        shape[1] != (2 * size if input_gate else size)
        or x.stride(1) != 1
        or not (_is_vector(added, out) and _is_vector(norm_weight, size) and _is_vector(norm_bias, size))
    ):
        return None
    rows, residual, add = shape[0], fusion.residual, 0
    if gate:
        out //= 2
    if residual is not None:
        if residual.shape != (rows, out) or residual.dtype != x.dtype or not (residual.is_contiguous() and residual.is_cpu):
            return None
        add = residual.data_ptr()
    y = torch.empty(rows, out, dtype=x.dtype)
    refused = found.linear(
        LINEAR(
            found.fork, torch.get_num_threads(), x.data_ptr(), weight.address, scale.address, zero.address, offset.address,
            added.address, add, norm_weight.address, norm_bias.address, y.data_ptr(),
            rows, size, out, x.stride(0), dtype, weight.dtype, scale.dtype, group,
            added.dtype, norm_weight.dtype, norm_bias.dtype, NORMS[fusion.norm_kind], input_gate, gate, fusion.norm_eps,
        )
    )  # fmt: skip
    return None if refused else y


def _is_vector(found: Known, size: int) -> bool:
    """Whether it is not there, or has a float for each feature."""
    return found is NOTHING or (found.numel == size and found.dtype in FLOATS)
