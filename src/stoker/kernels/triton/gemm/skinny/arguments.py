"""The groups of arguments of the skinny GEMM kernels.

Named tuples of tensors and integers are runtime arguments; named tuples of plain Python values are passed as one `tl.constexpr`. Inside a
kernel a field of the latter is first bound to a local `NAME: tl.constexpr`, as in `attention.arguments`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QuantizedTokens(NamedTuple):
    """Runtime: activations of `m` tokens, quantized by `gemm.quantized.activations`."""

    values_ptr: Tensor  # e4m3 [m, padded k], or int8 [2 × m, padded k]: the coarse digits of all tokens, then the fine ones
    scale_ptr: Tensor  # float32 [m]
    sums_ptr: Tensor | None  # int4: float32 [groups, m], the sum of each group's values in units of the fine digit
    stride_row: int  # bytes


class QuantizedWeight(NamedTuple):
    """Runtime: a weight of n rows; when gated, n gate rows, then the n rows that they gate."""

    values_ptr: Tensor  # [rows, row bytes]: int8, e4m3, or two int4 values per byte (see `kernel`)
    scale_ptr: Tensor | None  # float32 [rows]; int4: 16 bits [groups, rows]
    zero_ptr: Tensor | None  # int4: uint8 or 16 bits [groups, rows], by `WeightFormat.zero`
    stride_row: int  # bytes
    stride_group: int  # elements of scale and zero from one group to the next
    row_scale_ptr: Tensor | None = None  # FP4: float32 [rows], a further factor of the sums of a row


class Epilogue(NamedTuple):
    """Runtime: the bias and the residual that are added to the sums, and the memory for results."""

    bias_ptr: Tensor | None  # [rows of the weight]
    residual_ptr: Tensor | None  # [m, n]
    out_ptr: Tensor  # [m, n]


class SplitKScratch(NamedTuple):
    """Runtime: memory through which the split-K slices of a tile are added. None: one CTA computes the whole reduction dimension."""

    partial_ptr: Tensor | None  # float32 [tiles, splits, sums of a tile]
    finished_ptr: Tensor | None  # int32 [tiles]: CTAs that have stored their slice; zero between launches


class WeightFormat(NamedTuple):
    """Constants: how weights are stored."""

    form: str  # "int4", "int8" or "fp8" (e4m3)
    zero: str  # int4: (q - 8) × scale "none", (q - zero) × scale "int", q × scale + zero "float", FP4 × scale "e2m1"
    group: int  # int4: features that share a scale; else 1


class TileShape(NamedTuple):
    """Constants: the part of the product that one CTA computes, and with how many warps."""

    row_tiles: int  # tiles of 16 weight rows: of the CTA, in `skinny_int4` of each warp. Half of those of a gated weight are gates
    column_tiles: int  # tiles of 8 columns of the product
    num_warps: int
    num_stages: int  # chunks that a warp loads ahead of the one that it multiplies
    is_split: bool  # whether several CTAs share the reduction dimension
