"""What the experts' projections multiply: rows as plain numbers or codes, and stacked weights as the streaming kernel reads them."""

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
from stoker.kernels.triton.gemm.quantized.activations import encode_groups, encode_rows
from stoker.kernels.triton.gemm.quantized.fp8 import BLOCK_COLUMNS
from stoker.kernels.triton.gemm.quantized.tiles import digits_pay
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Operands:
    """Both sides of a projection."""

    rows: Tensor  # [digits × M, K], plain or codes
    weight: PackedWeight  # [E, N, K]
    scale: Tensor | None = None  # of codes: float32 [M], or [groups, M]
    sums: Tensor | None = None  # of digits: float32 [groups, M]
    digits: int = 1
    is_sorted: bool = False  # a row a choice, in the order of routing.order; else a row a token


def operands_of(x: Tensor, weight: PackedWeight, routing: Routing, tile_rows: int, is_sorted: bool) -> Operands:
    """Operands of `tile_rows` rows a tile, for x with a row a token, or a row a choice with `is_sorted`."""
    if weight.format == "dense":
        return Operands(x, weight, is_sorted=is_sorted)
    if weight.format == "int4":
        return _int4(x, weight, routing, tile_rows, is_sorted)
    if weight.group_size:
        return _blocks(x, weight, is_sorted) if weight.format == "fp8" else _digits(x, weight, tile_rows, is_sorted)
    return _bytes(x, weight, is_sorted)


def _bytes(x: Tensor, weight: PackedWeight, is_sorted: bool) -> Operands:
    """Activations as codes of the weight's dtype, or the weights widened to them."""
    if weight.activations == "none":
        return Operands(x, weight, is_sorted=is_sorted)
    made = encode_rows(x, weight.format, x.shape[1], input_scale=weight.input_scale)
    return Operands(made.codes, weight, made.scale, is_sorted=is_sorted)


def _int4(x: Tensor, weight: PackedWeight, routing: Routing, tile_rows: int, is_sorted: bool) -> Operands:
    """A few rows as digits, which multiply the values as they are. Groups that no tile has: weights widened in every call."""
    if weight.column_order is not None:
        x, is_sorted = permuted_rows(x, weight.column_order, routing, is_sorted), True
    if weight.layout == "stored":
        return Operands(x, _widened(weight, x.dtype, dequantize_int4), is_sorted=is_sorted)
    return _digits(x, weight, tile_rows, is_sorted)


def _digits(x: Tensor, weight: PackedWeight, tile_rows: int, is_sorted: bool) -> Operands:
    """A few rows as digits of whole groups with the sum of each group's, more as they are, to be multiplied by widened weights."""
    group = weight.group_size
    if not digits_pay(tile_rows, group, 4 if weight.format == "int4" else 8):
        return Operands(x, weight, is_sorted=is_sorted)
    made = encode_rows(x, "digits", triton.cdiv(weight.in_features, group) * group, group)
    return Operands(made.codes, weight, made.scale, made.sums, 2, is_sorted)


def _blocks(x: Tensor, weight: PackedWeight, is_sorted: bool) -> Operands:
    """e4m3 rows with a scale for each group of features. Blocks that no tile has: weights widened in every call."""
    columns = weight.group_size
    if columns not in BLOCK_COLUMNS:
        wide = _widened(weight, x.dtype, lambda expert, _: widen_blocks(expert))
        return Operands(round_groups(x.float(), columns).to(x.dtype), wide, is_sorted=is_sorted)
    made = encode_groups(x, columns)
    return Operands(made.codes, weight, made.scale, is_sorted=is_sorted)


def _widened(weight: PackedWeight, dtype: torch.dtype, widen: Callable[[PackedWeight, torch.dtype], Tensor]) -> PackedWeight:
    """A dense weight [E, N, K] of the same values, widened one expert after another, because they are float32 in between."""
    wide = torch.empty((weight.num_experts, weight.out_features, weight.in_features), dtype=dtype, device=weight.values.device)
    for expert in range(len(wide)):
        wide[expert] = widen(weight.expert(expert), dtype)
    return PackedWeight("dense", wide, bias=weight.bias)


def permuted_rows(x: Tensor, features: Tensor, routing: Routing, is_sorted: bool) -> Tensor:
    """Each sorted choice's row of x with its features in its expert's order, [T × k, K]. `features` int32 [num_experts, K].

    Rows that are no expert's here hold some order.
    """
    rows, (experts, k) = routing.order.shape[0], features.shape
    out = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    if rows:
        permute_kernel[(rows, triton.cdiv(k, _BLOCK))](
            x, features, routing.order, routing.offsets, out, k, x.stride(0), EXPERTS=experts,
            EXPERT_BLOCK=triton.next_power_of_2(experts), TOP_K=0 if is_sorted else routing.top_k, BLOCK=_BLOCK, num_warps=4,
            **pdl_launch_options(x),
        )  # fmt: skip
    return out


@triton.jit
def permute_kernel(
    x, features, order, offsets, out, k, stride_x,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK features of a sorted choice. Its expert is the number of experts that end at or before it."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    expert = tl.arange(0, EXPERT_BLOCK)
    end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=1 << 30)
    mine = tl.minimum(tl.sum((end <= row).to(tl.int32), 0), EXPERTS - 1)
    source = row
    if TOP_K > 0:
        source = tl.load(order + row) // TOP_K
    place = tl.load(features + mine.to(tl.int64) * k + cols, mask=cols < k, other=0)
    v = tl.load(x + source.to(tl.int64) * stride_x + place, mask=cols < k, other=0.0)
    tl.store(out + row.to(tl.int64) * k + cols, v, mask=cols < k)
