"""Linears of int8 weights on the GPU, with activations as they are or int8 too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.quantized.launch import Stored, few_rows, many_rows
from stoker.kernels.triton.gemm.quantized.tiles import DIGIT_ROWS, FEW_ROWS, digits_tile
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import PLAIN, Fusion

_BLOCK = 1024


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.int8_linear`. Few rows become two int8 digits each, so that the weights are multiplied as they are stored."""
    n, k = weight.shape
    stored = Stored("same", weight, scale, n, k)
    if supports_skinny(x, "bytes", stored):
        return skinny_linear(x, "bytes", stored, None, bias, fusion)
    if x.shape[0] <= FEW_ROWS // 2:
        return few_rows(x, stored, "digits", "int8", None, bias, fusion)
    if x.shape[0] <= DIGIT_ROWS:
        tile = digits_tile(x.shape[0], n // (1 if fusion.gate is None else 2), num_sms(x.device))
        return few_rows(x, stored, "digits", "int8", None, bias, fusion, tile)
    return many_rows(x, n, lambda a, b: dequantize_int8(weight[a:b], scale[a:b], x.dtype), bias, fusion)


def w8a8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """See `ops.w8a8_linear`."""
    return few_rows(x, Stored("same", weight, scale, *weight.shape), "int8", "w8a8", input_scale, bias, fusion)


def int8_embedding(token_ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ops.int8_embedding`."""
    return _rows(weight, scale, dtype, token_ids)


def dequantize_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight int8 [N, K] × scale float32 [N] in `dtype`."""
    return _rows(weight, scale, dtype, None)


@triton.jit
def int8_rows_kernel(weight, scale, ids, out, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program: BLOCK features of one row of out. A row that is not in the table is zeros."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    source = row
    if ids is not None:
        source = tl.load(ids + row).to(tl.int64)
    inside = (cols < SIZE) & (source >= 0) & (source < num_rows)
    codes = tl.load(weight + source * SIZE + cols, mask=inside, other=0)
    step = tl.load(scale + source, mask=(source >= 0) & (source < num_rows), other=0.0)
    tl.store(out + row * SIZE + cols, (codes.to(tl.float32) * step).to(out.dtype.element_ty), mask=cols < SIZE)


def _rows(weight: Tensor, scale: Tensor, dtype: torch.dtype, ids: Tensor | None) -> Tensor:
    size = weight.shape[1]
    out = torch.empty((weight.shape[0] if ids is None else ids.shape[0], size), dtype=dtype, device=weight.device)
    if out.numel():
        int8_rows_kernel[(out.shape[0], triton.cdiv(size, _BLOCK))](
            weight, scale, ids, out, weight.shape[0], SIZE=size, BLOCK=_BLOCK, num_warps=4, **pdl_launch_options(weight)
        )
    return out
