"""Linears of int8 weights on the GPU, with activations as they are or int8 too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_int8 as reference
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.quantized.launch import few_rows, many_rows
from stoker.kernels.triton.gemm.quantized.tiles import DIGIT_ROWS, FEW_ROWS, digits_tile
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import PLAIN, Fusion

_BLOCK = 1024


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """See `ops.prepare_weight`: unchanged."""
    return weight


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.packed_linear`. Without activation quantization, up to DIGIT_ROWS rows become two int8 digits each, so that the weights are
    multiplied as they are stored. Weights in groups run through plain torch; formats widen them at load."""
    if weight.group_size:
        return reference.packed_linear(x, weight, fusion)
    if weight.activations != "none":
        return few_rows(x, weight, "int8", "w8a8", fusion)
    if supports_skinny(x, weight):
        return skinny_linear(x, weight, fusion)
    if x.shape[0] <= FEW_ROWS // 2:
        return few_rows(x, weight, "digits", "int8", fusion)
    if x.shape[0] <= DIGIT_ROWS:
        tile = digits_tile(x.shape[0], weight.out_features // (1 if fusion.gate is None else 2), num_sms(x.device))
        return few_rows(x, weight, "digits", "int8", fusion, tile)
    return many_rows(x, weight, lambda a, b: dequantize_int8(weight, a, b, x.dtype), fusion)


def packed_embedding(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """See `ops.packed_embedding`."""
    if weight.group_size:
        return reference.packed_embedding(token_ids, weight, dtype)
    return _rows(weight.values, _scales(weight), dtype, token_ids)


def dequantize_int8(weight: PackedWeight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows first : last of the real weight, which has no groups."""
    return _rows(weight.values[first:last], _scales(weight)[first:last], dtype, None)


def _scales(weight: PackedWeight) -> Tensor:
    assert weight.scale is not None
    return weight.scale


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
    """Rows `ids` [T], or all rows, of weight int8 [N, K] × scale float32 [N] in `dtype`."""
    size = weight.shape[1]
    out = torch.empty((weight.shape[0] if ids is None else ids.shape[0], size), dtype=dtype, device=weight.device)
    if out.numel():
        int8_rows_kernel[(out.shape[0], triton.cdiv(size, _BLOCK))](
            weight, scale, ids, out, weight.shape[0], SIZE=size, BLOCK=_BLOCK, num_warps=4, **pdl_launch_options(weight)
        )
    return out
