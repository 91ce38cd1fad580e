"""Experts with 64 rows each and more, through the grouped form of the GEMM for many rows (`gemm.large.experts`).

Mixtral-8x7B's half on a rank of two, 8 experts, two choices of a token, on an H200 (benchmarks/results/h200_grouped_gemm.json): gate and up
+ down, µs with the quantization of rows and the weighted sum. The library is `torch._scaled_grouped_mm` or `torch._grouped_mm`:

    |                 | FP8                                 | bfloat16                            |
    | rows per expert | here        moe.kernel  library     | here        moe.kernel  library     |
    | 64              | 136 + 76    159 + 84    155 + 90    | 265 + 131   273 + 142   323 + 162   |
    | 128             | 165 + 89    231 + 126   218 + 117   | 304 + 152   363 + 198   453 + 235   |
    | 192             | 192 + 110   280 + 147   412 + 224   | 351 + 189   460 + 261   385 + 179   |
    | 256             | 242 + 151   349 + 196   424 + 219   | 443 + 279   554 + 339   623 + 302   |
    | 512             | 418 + 246   618 + 370   723 + 323   | 790 + 423   966 + 522   903 + 481   |
    | 2,048           | 1454 + 834  2318 + 1291 1773 + 1071 | 3203 + 1459 4033 + 1950 2987 + 1575 |

Experts of Qwen3-30B-A3B (128) and gpt-oss-20b (32, with biases) gain as much. The floor of 2,048 rows is 972 and 486 µs in FP8, at 1.98
PFLOP/s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.routing import Routing
from stoker.kernels.triton.activation import gated
from stoker.kernels.triton.gemm.large.launch import large_gemm, supports_experts
from stoker.kernels.triton.gemm.large.tiles import NARROW_TILE, TALL_TILE, TILE, LargeGemmTile
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.moe.operands import sorted_rows

MIN_ROWS = 64  # per expert, on average; fewer were not measured
# Rows per expert, on average, up to which tiles have 128 rows and 128 of the weight, or 192 rows: 128 to 176 rows would fill two thirds of
# two tiles of 128, and narrow tiles let more CTAs work (3 to 5 % with 96 rows).
MAX_NARROW_ROWS, MAX_TALL_ROWS = 120, 176
TILES = (NARROW_TILE, TALL_TILE, TILE)


def is_supported(x: Tensor, weight: PackedWeight, routing: Routing) -> bool:
    """Whether the grouped form multiplies these choices. It is faster than `moe.kernel` then."""
    if weight.group_size or not routing.is_whole or x.dtype != torch.bfloat16:
        return False
    if weight.format != "dense" and weight.activations == "none":
        return False
    return len(routing.order) >= MIN_ROWS * weight.num_experts and supports_experts(weight.values)


def expert_linear(x: Tensor, weight: PackedWeight, routing: Routing, input_gate: str | None = None, *, is_sorted: bool) -> Tensor:
    """[T × k, n]: row c is the input of choice routing.order[c], multiplied by the weight of its expert.

    x is bfloat16. With `is_sorted` it has a row per choice in the order of routing.order, else a row per token. With `input_gate`, a row
    has gates and ups.
    """
    scales: dict[str, Tensor | None] = {}
    if weight.format == "dense":
        rows = x if input_gate is None else gated(x, input_gate)
        if not is_sorted:
            rows = rows.index_select(0, routing.tokens)
    else:
        quantized = sorted_rows(x, weight, routing, input_gate, is_sorted)
        rows, scales = quantized.values, {"x_scale": quantized.scale, "weight_scale": weight.scale}
    # The ahead-of-time trace runs few numbers of tokens, and must list the kernels of all.
    for tile in TILES if x.is_meta else (tile_of(len(rows), weight.num_experts),):
        out = large_gemm(rows, weight.values, tile, **scales, bias=weight.bias, offsets=routing.offsets)
    return out


def tile_of(rows: int, experts: int) -> LargeGemmTile:
    """The tile for `rows` choices, by the mean number of rows of `experts` experts."""
    rows_per_expert = cdiv(rows, experts)
    if rows_per_expert <= MAX_NARROW_ROWS:
        return NARROW_TILE
    return TALL_TILE if rows_per_expert <= MAX_TALL_ROWS else TILE
