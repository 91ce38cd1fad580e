"""The operands of an expert projection: activations, unquantized or quantized, and stacked weights in a form that `moe.kernel` supports.

`gather_features_kernel` (experts that were quantized with their input features in an order of their own):

    out[c, i] = x[row(c), features[expert(c), i]]                 for each sorted choice c and feature i; see `moe.kernel` for row(c)

Grid: choices × blocks of BLOCK features. Theoretical floor: one read and one write of x at the speed of memory. Not measured by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.quant_fp8 import round_groups, widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.routing import Routing
from stoker.kernels.triton.activation import gated
from stoker.kernels.triton.gemm.quantized.activations import QuantizedActivations, quantize_groups, quantize_rows
from stoker.kernels.triton.gemm.quantized.arguments import ActivationPointers
from stoker.kernels.triton.gemm.quantized.fp8 import BLOCK_COLUMNS
from stoker.kernels.triton.gemm.quantized.tiles import digits_are_faster
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertOperands:
    """Both operands of a projection."""

    x: ActivationPointers
    weight: PackedWeight  # [E, N, K]
    digits: int = 1  # int8 digits of an activation
    is_sorted: bool = False  # x has a row per choice, in the order of routing.order; else a row per token


def expert_operands(
    x: Tensor, weight: PackedWeight, routing: Routing, tile_tokens: int, is_sorted: bool, input_gate: str | None = None
) -> ExpertOperands:
    """The kernel operands for activations x and an expert projection `weight`, in tiles of `tile_tokens` tokens.

    Quantizes x if the format of `weight` requires it, in the same launch as the gate, if there is one: x then has gates, then ups. x has a
    row per sorted choice with `is_sorted`, otherwise a row per token.
    """
    if weight.format in ("fp8", "int8") and not weight.group_size:
        return _row_scaled_operands(x, weight, is_sorted, input_gate)
    x = x if input_gate is None else gated(x, input_gate)
    if weight.format == "dense":
        return _unquantized(x, weight, is_sorted)
    if weight.format == "int4":
        return _int4_operands(x, weight, routing, tile_tokens, is_sorted)
    is_block_fp8 = weight.format == "fp8"
    return _block_operands(x, weight, is_sorted) if is_block_fp8 else _group_operands(x, weight, tile_tokens, is_sorted)


def _unquantized(x: Tensor, weight: PackedWeight, is_sorted: bool) -> ExpertOperands:
    """x and the weight as they are."""
    return ExpertOperands(ActivationPointers(x, None, None), weight, is_sorted=is_sorted)


def _row_scaled_operands(x: Tensor, weight: PackedWeight, is_sorted: bool, input_gate: str | None) -> ExpertOperands:
    """For weights with a scale per row: x quantized to the weight's dtype, or unquantized if the format has no activation quantization."""
    if weight.activations == "none":
        return _unquantized(x if input_gate is None else gated(x, input_gate), weight, is_sorted)
    quantized = _quantized_rows(x, weight, input_gate)
    return ExpertOperands(ActivationPointers(quantized.values, quantized.scale, None), weight, is_sorted=is_sorted)


def sorted_rows(x: Tensor, weight: PackedWeight, routing: Routing, input_gate: str | None, is_sorted: bool) -> QuantizedActivations:
    """x quantized to FP8 for a grouped product: a row per choice, in the order of routing.order, which x has already with `is_sorted`."""
    return _quantized_rows(x, weight, input_gate) if is_sorted else _quantized_rows(x, weight, input_gate, routing.order, routing.top_k)


def _quantized_rows(
    x: Tensor, weight: PackedWeight, input_gate: str | None, order: Tensor | None = None, top_k: int = 1
) -> QuantizedActivations:
    """x after `input_gate`, quantized to the dtype of `weight`. `order` and `top_k` select rows (`quantize_rows`)."""
    features = x.shape[1] // (1 if input_gate is None else 2)
    return quantize_rows(x, weight.format, features, input_scale=weight.input_scale, gate=input_gate, order=order, top_k=top_k)


def _int4_operands(x: Tensor, weight: PackedWeight, routing: Routing, tile_tokens: int, is_sorted: bool) -> ExpertOperands:
    """For int4 weights: x, reordered if the weight has a column order, and quantized by `_group_operands`.

    Weights in groups that no tile supports are dequantized in every call.
    """
    if weight.column_order is not None:
        x, is_sorted = gather_features(x, weight.column_order, routing, is_sorted), True
    if weight.layout == "stored":
        return _unquantized(x, _dequantized(weight, x.dtype, dequantize_int4), is_sorted)
    if weight.is_fp4:  # digits are integers
        return _unquantized(x, weight, is_sorted)
    return _group_operands(x, weight, tile_tokens, is_sorted)


def _group_operands(x: Tensor, weight: PackedWeight, tile_tokens: int, is_sorted: bool) -> ExpertOperands:
    """For weights in groups: x as digits of whole groups for small tiles, else x unquantized, which dequantized weights multiply."""
    group = weight.group_size
    if not digits_are_faster(tile_tokens, group, 4 if weight.format == "int4" else 8):
        return _unquantized(x, weight, is_sorted)
    quantized = quantize_rows(x, "digits", cdiv(weight.in_features, group) * group, group)
    return ExpertOperands(ActivationPointers(quantized.values, quantized.scale, quantized.group_sums), weight, 2, is_sorted)


def _block_operands(x: Tensor, weight: PackedWeight, is_sorted: bool) -> ExpertOperands:
    """For FP8 weights in blocks: x quantized to float8_e4m3fn with a scale per group of features.

    Weights in blocks that no tile supports are dequantized in every call.
    """
    columns = weight.group_size
    if columns not in BLOCK_COLUMNS:
        dequantized = _dequantized(weight, x.dtype, lambda expert, _: widen_blocks(expert))
        return _unquantized(round_groups(x.float(), columns).to(x.dtype), dequantized, is_sorted)
    quantized = quantize_groups(x, columns)
    return ExpertOperands(ActivationPointers(quantized.values, quantized.scale, None), weight, is_sorted=is_sorted)


def _dequantized(weight: PackedWeight, dtype: torch.dtype, dequantize: Callable[[PackedWeight, torch.dtype], Tensor]) -> PackedWeight:
    """The weight in the dense format, [E, N, K] in `dtype`. `dequantize(expert weight, dtype)` is called for one expert after another.

    This limits the size of temporary float32 tensors.
    """
    dense = torch.empty((weight.num_experts, weight.out_features, weight.in_features), dtype=dtype, device=weight.values.device)
    for expert in range(len(dense)):
        dense[expert] = dequantize(weight.expert(expert), dtype)
    return PackedWeight("dense", dense, bias=weight.bias)


def gather_features(x: Tensor, features: Tensor, routing: Routing, is_sorted: bool) -> Tensor:
    """[T × k, K]: for each sorted choice, the row of x with its features in the order that its expert requires.

    `features` is int32 [num_experts, K]. Rows of other ranks' choices are in the order of one of the experts here.
    """
    rows, (experts, k) = routing.order.shape[0], features.shape
    out = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    if rows:
        gather_features_kernel[(rows, cdiv(k, _BLOCK))](
            x,
            features,
            routing.order,
            routing.offsets,
            out,
            k,
            x.stride(0),
            EXPERTS=experts,
            EXPERT_BLOCK=next_power_of_2(experts),
            TOP_K=0 if is_sorted else routing.top_k,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_launch_options(x),
        )
    return out


@triton.jit
def gather_features_kernel(
    # Pointers
    x_ptr,  # [M, k]: a row per token, or with TOP_K = 0 a row per sorted choice
    features_ptr,  # int32 [EXPERTS, k]
    order_ptr,  # int32 [choices]
    offsets_ptr,  # int32 [EXPERTS + 1]
    out_ptr,  # [choices, k]
    # Sizes
    k,
    stride_x,
    # Constants
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,  # EXPERTS, rounded up to a power of two
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK features of one sorted choice. TOP_K is 0 if x has a row per sorted choice."""
    choice = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    # The expert of a choice is the number of experts that end at or before it.
    index = tl.arange(0, EXPERT_BLOCK)
    end = tl.load(offsets_ptr + 1 + index, mask=index < EXPERTS, other=1 << 30)
    expert = tl.minimum(tl.sum((end <= choice).to(tl.int32), 0), EXPERTS - 1)
    row = choice
    if TOP_K > 0:
        row = tl.load(order_ptr + choice) // TOP_K
    feature = tl.load(features_ptr + expert.to(tl.int64) * k + cols, mask=cols < k, other=0)  # [BLOCK]
    values = tl.load(x_ptr + row.to(tl.int64) * stride_x + feature, mask=cols < k, other=0.0)
    tl.store(out_ptr + choice.to(tl.int64) * k + cols, values, mask=cols < k)
