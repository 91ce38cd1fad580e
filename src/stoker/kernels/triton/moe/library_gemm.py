"""Experts with many rows each, through the library's grouped GEMM.

Its FP8 and bfloat16 products run at the rate of the matrix units, where `moe.kernel` reaches two thirds of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.routing import Routing
from stoker.kernels.triton.activation import gated
from stoker.kernels.triton.device import supports
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

# Rows per expert, on average, from which the library is used. Mixtral-8x7B's up projection on an H200, µs, `moe.kernel` and library:
#     rows per expert    128           256             512              2,048
#     FP8                501,  396       736,   799    1,267, 1,093     4,939, 3,261
#     bfloat16           744,  893     1,175, 1,096    1,815, 1,603     6,215, 5,229
LIBRARY_ROWS = {torch.float8_e4m3fn: 96, torch.bfloat16: 256}
# Of FP8, `moe.kernel` has more than the first and up to the second of these numbers of rows again. PyTorch's tiles have 64 rows up to the
# first one. With more they have 256 for weights of at least _TALL_SIZE rows and features, and by the table they come in pairs: 100 µs per
# expert and 512 rows (`moe.kernel`: 37 per 128), so that 129 rows take as long as 400. Decode steps of 768 rows of Mixtral on two GPUs,
# 192 per expert, took 31 ms with `moe.kernel` (2026-11-22) and 35 with the library (2026-11-29).
_TALL_ROWS = 128, 256
_TALL_SIZE = 2048


def is_faster(x: Tensor, weight: PackedWeight, routing: Routing) -> bool:
    """Whether the library supports this product and is faster than `moe.kernel`."""
    if weight.group_size or weight.bias is not None or not routing.is_whole or x.dtype != torch.bfloat16:
        return False
    if weight.format != "dense" and weight.activations == "none":
        return False
    experts, n, k = weight.values.shape
    rows = routing.order.shape[0]
    if rows < LIBRARY_ROWS.get(weight.values.dtype, math.inf) * experts or n % 16 or k % 16:
        return False
    return not _has_tall_tiles(weight, rows) and supports(x, "grouped_mm")


def _has_tall_tiles(weight: PackedWeight, rows: int) -> bool:
    """Whether the library would multiply `rows` rows in tiles that are mostly padding."""
    experts, n, k = weight.values.shape
    most_small, most = _TALL_ROWS
    return weight.format != "dense" and min(n, k) >= _TALL_SIZE and rows // experts > most_small and rows <= most * experts


def expert_linear(x: Tensor, weight: PackedWeight, routing: Routing, input_gate: str | None = None, *, is_sorted: bool) -> Tensor:
    """[T × k, n]: row c is the input of choice routing.order[c], multiplied by the weight of its expert.

    x is bfloat16. With `is_sorted` it has a row per choice in the order of routing.order, else a row per token. With `input_gate`, a row
    has gates and ups.
    """
    ends = routing.offsets[1:]
    tokens = None if is_sorted else torch.div(routing.order, routing.top_k, rounding_mode="floor")
    transposed = weight.values.transpose(-2, -1)
    if weight.format == "dense":
        x = x if input_gate is None else gated(x, input_gate)
        return torch._grouped_mm(x if tokens is None else x.index_select(0, tokens), transposed, offs=ends)
    assert weight.scale is not None
    quantized = quantize_rows(x, "fp8", x.shape[1] // (1 if input_gate is None else 2), input_scale=weight.input_scale, gate=input_gate)
    values, scale = quantized.values, quantized.scale
    if tokens is not None:
        values = values.view(torch.uint8).index_select(0, tokens).view(values.dtype)
        scale = scale.index_select(0, tokens)
    return torch._scaled_grouped_mm(values, transposed, scale, weight.scale, offs=ends, out_dtype=x.dtype, use_fast_accum=True)


def inverse_order(routing: Routing) -> Tensor:
    """int32 [T × k]: for each choice, its index in routing.order."""
    order = routing.order.long()
    return torch.empty_like(routing.order).scatter_(0, order, torch.arange(len(order), dtype=torch.int32, device=order.device))
