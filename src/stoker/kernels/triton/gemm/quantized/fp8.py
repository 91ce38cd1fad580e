"""Linears of float8_e4m3fn weights on the GPU: e4m3 × e4m3 in the matrix units, or weights widened for plain activations."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.reference import quant_fp8 as reference
from stoker.kernels.triton.gemm.quantized.activations import encode_rows
from stoker.kernels.triton.gemm.quantized.fp8_gemv import gemv_tile, one_row
from stoker.kernels.triton.gemm.quantized.launch import (
    Stored,
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


def prepare_fp8(weight: Tensor) -> Tensor:
    """See `ops.prepare_fp8`: as stored."""
    return weight


def prepare_block_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """See `ops.prepare_block_fp8`: as stored."""
    return weight


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    activations: str,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    fusion: Fusion = PLAIN,
) -> Tensor:
    """See `ops.fp8_linear`."""
    n, k = weight.shape
    if activations == "none":
        if x.shape[0] <= MIDDLE_ROWS:
            return plain_rows(x, Stored("wide", weight, scale, n, k), bias, fusion)
        return many_rows(x, n, lambda a, b: (weight[a:b].float() * scale[a:b, None]).to(x.dtype), bias, fusion)
    step = input_scale if activations == "static" else None
    x, fusion = ungated(x, fusion) if x.shape[0] == 1 else (x, fusion)
    one = gemv_tile(x, weight, fusion)
    if one is not None:
        check_residual(fusion, 1, n)
        return one_row(x, weight, scale, step, bias, fusion, one)
    stored = Stored("same", weight, scale, n, k)
    if supports_skinny(x, "fp8", stored):
        return skinny_linear(x, "fp8", stored, step, bias, fusion)
    if x.shape[0] > FEW_ROWS and _library_takes(x, weight):
        return scaled_rows(x, weight, scale, step, bias, fusion)
    return few_rows(x, stored, "fp8", "fp8", step, bias, fusion)


def scaled_rows(x: Tensor, weight: Tensor, scale: Tensor, step: Tensor | None, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """Many rows: the library's GEMM with a scale for each row of both operands."""
    x, fusion = without_layer_norm(x, fusion)
    made = encode_rows(
        x, "fp8", weight.shape[1], norm_weight=fusion.norm_weight, eps=fusion.norm_eps, input_scale=step, gate=fusion.input_gate
    )
    y = torch._scaled_mm(made.codes, weight.t(), made.scale[:, None], scale[None, :], bias=bias, out_dtype=x.dtype, use_fast_accum=True)
    return after(y, fusion)


def _library_takes(x: Tensor, weight: Tensor) -> bool:
    """cuBLAS's FP8 product with scales by row makes bfloat16, of sides that are multiples of 16."""
    return not x.is_cpu and x.dtype == torch.bfloat16 and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def block_fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """See `ops.block_fp8_linear`. Blocks whose columns are no power of two from 32 to 256 run through plain torch."""
    if block[1] not in BLOCK_COLUMNS:
        return reference.block_fp8_linear(x, weight, scale, block, bias, fusion)
    stored = Stored("block", weight, scale.contiguous(), *weight.shape, group=block[1], block_rows=block[0])
    return block_rows(x, stored, bias, fusion)
