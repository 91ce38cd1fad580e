"""Linears of int8 weights with a scale per row on the GPU, and int8 embedding tables.

Weights in groups are computed by the reference: formats dequantize them at load. With a scale per row of the weight:

activations    rows                path
quantized      any                 `quantized_activation_linear`
none           up to 8             `gemm.skinny`
               up to 128 or 256    as digits by the stored weights, `quantized_activation_linear`
               129 to 2048         as digits by the stored weights, `gemm.large`, where it is supported and faster
               more                `dequantized_linear`

`int8_rows_kernel`: out[i] = weight[ids[i]] × scale[ids[i]]. Grid: rows × blocks of BLOCK features. Theoretical floor: one read of each byte
and one write of each result at the speed of memory: 47 µs for 16,384 rows of 4,096 features, measured 51.1 on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_int8 as reference
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.large import launch as large
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.gemm.quantized.launch import (
    apply_output_fusion,
    apply_unfused_norm,
    dequantized_linear,
    quantized_activation_linear,
)
from stoker.kernels.triton.gemm.quantized.tiles import MAX_DIGIT_ROWS, MAX_SKINNY_ROWS, digits_take_one_round, digits_tile
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import PLAIN, Fusion

_BLOCK = 4096  # features of a CTA: 32 per thread, whose loads are all issued before the first store


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """The weight itself, unchanged (`ops.prepare_weight`)."""
    return weight


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an int8 weight (`ops.packed_linear`)."""
    if weight.group_size:
        return reference.packed_linear(x, weight, fusion)
    if weight.activations != "none":
        return quantized_activation_linear(x, weight, "int8", "w8a8", fusion)
    if supports_skinny(x, weight):
        return skinny_linear(x, weight, fusion)
    takes_one_round = digits_take_one_round(x.shape[0], weight.out_features, num_sms(x.device))
    if large.supports_digits(x, weight.values) and not takes_one_round:
        return large_int8_linear(x, weight, fusion)
    if x.shape[0] <= MAX_SKINNY_ROWS // 2:
        return quantized_activation_linear(x, weight, "digits", "int8", fusion)
    if x.shape[0] <= MAX_DIGIT_ROWS:
        tile = digits_tile(x.shape[0], weight.out_features // (1 if fusion.gate is None else 2), num_sms(x.device))
        return quantized_activation_linear(x, weight, "digits", "int8", fusion, tile)
    return dequantized_linear(x, weight, lambda a, b: dequantize_int8(weight, a, b, x.dtype), fusion)


def large_int8_linear(x: Tensor, weight: PackedWeight, fusion: Fusion) -> Tensor:
    """A linear with x as digits, by `gemm.large`, for which `large.supports_digits`."""
    x, fusion = apply_unfused_norm(x, fusion)
    q = quantize_rows(x, "slabs", weight.in_features, 0, fusion.norm_weight, fusion.norm_eps, None, fusion.input_gate)
    scales, digits = {"x_scale": q.scale, "weight_scale": _scales(weight)}, large.Digits(x.shape[0], x.dtype)
    return apply_output_fusion(large.large_gemm(q.values, weight.values, **scales, bias=weight.bias, digits=digits), fusion)


def packed_embedding(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of an int8 embedding table, dequantized to `dtype` (`ops.packed_embedding`)."""
    if weight.group_size:
        return reference.packed_embedding(token_ids, weight, dtype)
    return _dequantize_rows(weight.values, _scales(weight), dtype, token_ids)


def dequantize_int8(weight: PackedWeight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows first : last of a weight without groups, dequantized to `dtype`."""
    return _dequantize_rows(weight.values[first:last], _scales(weight)[first:last], dtype, None)


def _scales(weight: PackedWeight) -> Tensor:
    assert weight.scale is not None
    return weight.scale


@triton.jit
def int8_rows_kernel(
    weight_ptr,  # int8 [num_rows, SIZE]
    scale_ptr,  # float32 [num_rows]
    ids_ptr,  # [rows of out], or None: row i of out is row i of the weight
    out_ptr,  # [.., SIZE]
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK features of one row, dequantized. Without `ids_ptr`, all rows in order. Ids outside the table give zeros."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    source = row
    if ids_ptr is not None:
        source = tl.load(ids_ptr + row).to(tl.int64)
    inside = (cols < SIZE) & (source >= 0) & (source < num_rows)
    values = tl.load(weight_ptr + source * SIZE + cols, mask=inside, other=0)
    scale = tl.load(scale_ptr + source, mask=(source >= 0) & (source < num_rows), other=0.0)
    # q + 128 as the last byte of 2^23 = 0x4B000000: a conversion would be an instruction of a quarter of the rate.
    biased = (values.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
    numbers = biased.to(tl.float32, bitcast=True) - (8388608.0 + 128.0)
    tl.store(out_ptr + row * SIZE + cols, (numbers * scale).to(out_ptr.dtype.element_ty), mask=cols < SIZE)


def _dequantize_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype, ids: Tensor | None) -> Tensor:
    """Rows `ids` [T] (None: all rows) of weight int8 [N, K] × scale float32 [N], in `dtype`."""
    size = weight.shape[1]
    out = torch.empty((weight.shape[0] if ids is None else ids.shape[0], size), dtype=dtype, device=weight.device)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(size))
        int8_rows_kernel[(out.shape[0], cdiv(size, block))](
            weight, scale, ids, out, weight.shape[0], SIZE=size, BLOCK=block, num_warps=4, **pdl_launch_options(weight)
        )
    return out
