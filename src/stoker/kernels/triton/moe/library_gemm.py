"""Experts of many rows through the library's grouped product, which has the arithmetic's rate where own tiles have two thirds of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.routing import Routing
from stoker.kernels.triton.device import supports
from stoker.kernels.triton.gemm.quantized.activations import encode_rows

# Of an expert, on average. H200, µs of Mixtral-8x7B's up projection, own tiles and library: with 128 rows each 501 and 396 in FP8, 744 and
# 893 in bfloat16; 256 rows 736 and 799, 1,175 and 1,096; 512 rows 1,267 and 1,093, 1,815 and 1,603; 2,048 rows 4,939 and 3,261, 6,215 and
# 5,229.
LIBRARY_ROWS = {torch.float8_e4m3fn: 96, torch.bfloat16: 256}


def takes(x: Tensor, weight: PackedWeight, routing: Routing) -> bool:
    """Whether the library has this product, and is faster."""
    if weight.group_size or weight.bias is not None or not routing.is_whole or x.dtype != torch.bfloat16:
        return False
    if weight.format != "dense" and weight.activations == "none":
        return False
    experts, n, k = weight.values.shape
    rows = LIBRARY_ROWS.get(weight.values.dtype, math.inf) * experts
    return routing.order.shape[0] >= rows and n % 16 == k % 16 == 0 and supports(x, "grouped_mm")


def product(x: Tensor, weight: PackedWeight, routing: Routing, *, is_sorted: bool) -> Tensor:
    """Each choice's row through its expert: [T × k, n] in the order of routing.order.

    x bfloat16 has a row a choice in that order with `is_sorted`, else a row a token.
    """
    ends = routing.offsets[1:]
    tokens = None if is_sorted else torch.div(routing.order, routing.top_k, rounding_mode="floor")
    columns = weight.values.transpose(-2, -1)
    if weight.format == "dense":
        return torch._grouped_mm(x if tokens is None else x.index_select(0, tokens), columns, offs=ends)
    assert weight.scale is not None
    made = encode_rows(x, "fp8", x.shape[1], input_scale=weight.input_scale)
    codes, scale = made.codes, made.scale
    if tokens is not None:
        codes = codes.view(torch.uint8).index_select(0, tokens).view(codes.dtype)
        scale = scale.index_select(0, tokens)
    return torch._scaled_grouped_mm(codes, columns, scale, weight.scale, offs=ends, out_dtype=x.dtype, use_fast_accum=True)


def places(routing: Routing) -> Tensor:
    """int32 [T × k]: where in routing.order each choice is."""
    order = routing.order.long()
    return torch.empty_like(routing.order).scatter_(0, order, torch.arange(len(order), dtype=torch.int32, device=order.device))
