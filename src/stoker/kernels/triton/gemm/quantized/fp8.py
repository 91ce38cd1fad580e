"""Linears of float8_e4m3fn weights on the GPU: e4m3 × e4m3 in the matrix units, or weights widened for plain activations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_fp8 as reference
from stoker.kernels.triton.gemm.quantized.activations import encode_rows
from stoker.kernels.triton.gemm.quantized.fp8_gemv import gemv_tile, one_row
from stoker.kernels.triton.gemm.quantized.launch import (
    after,
    block_rows,
    check_residual,
    few_rows,
    many_rows,
    plain_rows,
    ungated,
    without_layer_norm,
)
from stoker.kernels.triton.gemm.quantized.tiles import FEW_ROWS, MIDDLE_ROWS
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.types import PLAIN, Fusion

BLOCK_COLUMNS = (32, 64, 128, 256)  # features of a block that a tile can have


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """See `ops.prepare_weight`. The kernels read dense scales."""
    return replace(weight, scale=weight.scale.contiguous()) if weight.scale is not None else weight


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.packed_linear`. Blocks whose columns are no power of two from 32 to 256 run through plain torch."""
    if weight.group_size:
        return block_rows(x, weight, fusion) if weight.group_size in BLOCK_COLUMNS else reference.packed_linear(x, weight, fusion)
    if weight.activations == "none":
        if x.shape[0] <= MIDDLE_ROWS:
            return plain_rows(x, weight, fusion)
        values, scale = weight.values, weight.scale
        assert scale is not None
        return many_rows(x, weight, lambda a, b: (values[a:b].float() * scale[a:b, None]).to(x.dtype), fusion)
    x, fusion = ungated(x, fusion) if x.shape[0] == 1 else (x, fusion)
    one = gemv_tile(x, weight, fusion)
    if one is not None:
        check_residual(fusion, 1, weight.out_features)
        return one_row(x, weight, fusion, one)
    if supports_skinny(x, weight):
        return skinny_linear(x, weight, fusion)
    if x.shape[0] > FEW_ROWS and _library_takes(x, weight):
        return scaled_rows(x, weight, fusion)
    return few_rows(x, weight, "fp8", "fp8", fusion)


def scaled_rows(x: Tensor, weight: PackedWeight, fusion: Fusion) -> Tensor:
    """Many rows: the library's GEMM with a scale for each row of both operands."""
    x, fusion = without_layer_norm(x, fusion)
    made = encode_rows(
        x, "fp8", weight.in_features, norm_weight=fusion.norm_weight, eps=fusion.norm_eps, input_scale=weight.input_scale,
        gate=fusion.input_gate,
    )  # fmt: skip
    assert weight.scale is not None
    y = torch._scaled_mm(
        made.codes, weight.values.t(), made.scale[:, None], weight.scale[None, :], bias=weight.bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return after(y, fusion)


def _library_takes(x: Tensor, weight: PackedWeight) -> bool:
    """cuBLAS's FP8 product with scales by row makes bfloat16, of sides that are multiples of 16."""
    return not x.is_cpu and x.dtype == torch.bfloat16 and weight.out_features % 16 == 0 and weight.in_features % 16 == 0
