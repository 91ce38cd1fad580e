"""Linears of float8_e4m3fn weights on the GPU: float8 × float8 in the matrix units, or weights dequantized for unquantized activations.

activations    rows           path
quantized      1              `fp8_gemv`, where it is the fastest
               up to 8        `gemm.skinny`
               more than 64   in bfloat16: the library's GEMM with a scale per row of both operands, or `gemm.large`,
                              unless all tiles of `quantized_activation_linear` run at the same time
               otherwise      `quantized_activation_linear`
none           up to 512      `plain_activation_linear`
               more           `dequantized_linear`
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_fp8 as reference
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.large import launch as large
from stoker.kernels.triton.gemm.large.tiles import MEDIUM_ROWS, medium_tile
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.gemm.quantized.fp8_gemv import fp8_gemv, gemv_tile
from stoker.kernels.triton.gemm.quantized.launch import (
    apply_input_gate,
    apply_output_fusion,
    apply_unfused_norm,
    block_fp8_activation_linear,
    check_residual,
    dequantized_linear,
    one_round_linear_tile,
    plain_activation_linear,
    quantized_activation_linear,
)
from stoker.kernels.triton.gemm.quantized.tiles import MAX_SKINNY_ROWS, MAX_UPCAST_ROWS
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.types import PLAIN, Fusion

BLOCK_COLUMNS = (32, 64, 128, 256)  # columns of a block that a tile can have


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """The weight with contiguous scales (`ops.prepare_weight`)."""
    return replace(weight, scale=weight.scale.contiguous()) if weight.scale is not None else weight


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an FP8 weight (`ops.packed_linear`). The reference computes block formats whose columns are not in BLOCK_COLUMNS."""
    if weight.group_size:
        if weight.group_size in BLOCK_COLUMNS:
            return block_fp8_activation_linear(x, weight, fusion)
        return reference.packed_linear(x, weight, fusion)
    if weight.activations == "none":
        if x.shape[0] <= MAX_UPCAST_ROWS:
            return plain_activation_linear(x, weight, fusion)
        values, scale = weight.values, weight.scale
        assert scale is not None
        return dequantized_linear(x, weight, lambda a, b: (values[a:b].float() * scale[a:b, None]).to(x.dtype), fusion)
    x, fusion = apply_input_gate(x, fusion) if x.shape[0] == 1 else (x, fusion)
    tile = gemv_tile(x, weight, fusion)
    if tile is not None:
        check_residual(fusion, 1, weight.out_features)
        return fp8_gemv(x, weight, fusion, tile)
    if supports_skinny(x, weight):
        return skinny_linear(x, weight, fusion)
    if x.shape[0] > MAX_SKINNY_ROWS and _library_supports(x, weight) and one_round_linear_tile(x, weight, "fp8", fusion) is None:
        return large_fp8_linear(x, weight, fusion)
    return quantized_activation_linear(x, weight, "fp8", "fp8", fusion)


def gates_output(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `gemm.large` gates the output of the linear in its epilogue (`ops.gates_output`)."""
    if x.shape[0] not in MEDIUM_ROWS or not supports(x, "large_gemm") or not _library_supports(x, weight):
        return False
    if weight.group_size or weight.activations == "none" or one_round_linear_tile(x, weight, "fp8", PLAIN) is not None:
        return False
    return medium_tile(x.shape[0], weight.out_features // 2, weight.in_features, "silu", num_sms(x.device)) is not None


def large_fp8_linear(x: Tensor, weight: PackedWeight, fusion: Fusion) -> Tensor:
    """A linear with a scale for each row of both operands: by `gemm.large` where it is faster, or by the library's GEMM."""
    x, fusion = apply_unfused_norm(x, fusion)
    k, scale = weight.in_features, weight.scale
    assert scale is not None
    q = quantize_rows(x, "fp8", k, 0, fusion.norm_weight, fusion.norm_eps, weight.input_scale, fusion.input_gate)
    tile = large.faster_tile(q.values, weight.values, fusion)
    if tile is not None:
        scales = {"x_scale": q.scale, "weight_scale": scale}
        return large.large_gemm(q.values, weight.values, tile, **scales, bias=weight.bias, residual=fusion.residual, gate=fusion.gate)
    y = torch._scaled_mm(
        q.values, weight.values.t(), q.scale[:, None], scale[None, :], bias=weight.bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return apply_output_fusion(y, fusion)


def _library_supports(x: Tensor, weight: PackedWeight) -> bool:
    """Whether cuBLAS multiplies these operands: it supports scales per row for bfloat16 results and sides that are multiples of 16."""
    return not x.is_cpu and x.dtype == torch.bfloat16 and weight.out_features % 16 == 0 and weight.in_features % 16 == 0
