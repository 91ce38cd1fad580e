"""What the experts' projections multiply: rows as plain numbers or codes, and stacked weights as the streaming kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.quantized import BlockExperts, ExpertWeights, Int4Experts, Int4Weight, Int8Experts, StoredExperts
from stoker.kernels.reference.quant_fp8 import round_groups, widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.routing import Routing
from stoker.kernels.triton.gemm.quantized.activations import encode_groups, encode_rows
from stoker.kernels.triton.gemm.quantized.fp8 import BLOCK_COLUMNS
from stoker.kernels.triton.gemm.quantized.int4 import Packed
from stoker.kernels.triton.gemm.quantized.launch import Stored
from stoker.kernels.triton.gemm.quantized.tiles import digits_pay
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Operands:
    """Both sides of a projection."""

    rows: Tensor  # [digits × M, K], plain or codes
    stored: Stored
    scale: Tensor | None = None  # of codes: float32 [M], or [groups, M]
    sums: Tensor | None = None  # of digits: float32 [groups, M]
    digits: int = 1
    is_sorted: bool = False  # a row a choice, in the order of routing.order; else a row a token


def dense(x: Tensor, weight: Tensor, is_sorted: bool) -> Operands:
    return Operands(x, Stored("same", weight, None, *weight.shape[1:]), is_sorted=is_sorted)


def quantized(x: Tensor, weight: StoredExperts, routing: Routing, tile_rows: int, is_sorted: bool) -> Operands:
    """Operands of `tile_rows` rows a tile, for x with a row a token, or a row a choice with `is_sorted`."""
    if isinstance(weight, Int4Experts):
        return _int4(x, weight, routing, tile_rows, is_sorted)
    if isinstance(weight, Int8Experts):
        return _groups(x, weight, tile_rows, is_sorted)
    return _blocks(x, weight, is_sorted) if isinstance(weight, BlockExperts) else _bytes(x, weight, is_sorted)


def _bytes(x: Tensor, weight: ExpertWeights, is_sorted: bool) -> Operands:
    """Activations as codes of the weight's dtype, or the weights widened to them."""
    n, k = weight.weight.shape[1:]
    if weight.activations == "none":
        return Operands(x, Stored("wide", weight.weight, weight.scale, n, k), is_sorted=is_sorted)
    step = weight.input_scale if weight.activations == "static" else None
    made = encode_rows(x, "fp8" if weight.weight.dtype == torch.float8_e4m3fn else "int8", x.shape[1], input_scale=step)
    return Operands(made.codes, Stored("same", weight.weight, weight.scale, n, k), made.scale, is_sorted=is_sorted)


def _int4(x: Tensor, weight: Int4Experts, routing: Routing, tile_rows: int, is_sorted: bool) -> Operands:
    """A few rows as digits, which multiply the codes as they are. Groups that no tile has: weights widened in every call."""
    if weight.order is not None:
        x, is_sorted = permuted_rows(x, weight.order, routing, is_sorted), True
    packed: Packed | None = weight.weight.packed
    if packed is None:
        return dense(x, _widened(weight.weight, x.dtype), is_sorted)
    stored = packed.stored()
    return _digits(x, stored, stored.k, tile_rows, is_sorted)


def _groups(x: Tensor, weight: Int8Experts, tile_rows: int, is_sorted: bool) -> Operands:
    n, k, group = *weight.weight.shape[1:], weight.group_size
    stored = Stored("groups", weight.weight, weight.scale, n, k, weight.offset, "none" if weight.offset is None else "float", group)
    return _digits(x, stored, triton.cdiv(k, group) * group, tile_rows, is_sorted)


def _digits(x: Tensor, stored: Stored, padded: int, tile_rows: int, is_sorted: bool) -> Operands:
    """A few rows as digits of `padded` features with the sum of each group's, more as they are, to be multiplied by widened weights."""
    if not digits_pay(tile_rows, stored.group, 4 if stored.form == "int4" else 8):
        return Operands(x, stored, is_sorted=is_sorted)
    made = encode_rows(x, "digits", padded, stored.group)
    return Operands(made.codes, stored, made.scale, made.sums, 2, is_sorted)


def _blocks(x: Tensor, weight: BlockExperts, is_sorted: bool) -> Operands:
    """e4m3 rows with a scale for each group of features. Blocks that no tile has: weights widened in every call."""
    (rows, columns), (experts, n, k) = weight.block, weight.weight.shape
    if columns not in BLOCK_COLUMNS:
        wide = x.new_empty(experts, n, k)
        for expert in range(experts):
            wide[expert] = widen_blocks(weight.weight[expert], weight.scale[expert], weight.block)
        return dense(round_groups(x.float(), columns).to(x.dtype), wide, is_sorted)
    made = encode_groups(x, columns)
    stored = Stored("block", weight.weight, weight.scale.contiguous(), n, k, group=columns, block_rows=rows)
    return Operands(made.codes, stored, made.scale, is_sorted=is_sorted)


def _widened(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """[num_experts, N, K], one expert after another: float32 passes by."""
    wide = torch.empty((*weight.codes.shape[:2], weight.in_features), dtype=dtype, device=weight.codes.device)
    for expert in range(len(wide)):
        zero, offset = (None if t is None else t[expert] for t in (weight.zero, weight.offset))
        wide[expert] = dequantize_int4(Int4Weight(weight.codes[expert], weight.scale[expert], zero, offset, weight.group_size), dtype)
    return wide


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
