"""The groups of arguments of the quantized GEMM kernels, for linears (`gemm.quantized.kernel`) and for experts (`moe.kernel`).

Named tuples of pointers are runtime arguments. Named tuples of plain Python values are passed as one `tl.constexpr` and compiled in. Inside
a kernel a field of the latter is a plain Python value: where Triton needs a constant (the shape of a tensor, the bounds of
`tl.static_range`, a string, an argument that may be None), it is first bound to a local `NAME: tl.constexpr`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class ActivationPointers(NamedTuple):
    """Runtime: the activations as they are multiplied.

    They have M rows: one per token, or one per (token, expert) pair sorted by expert.
    """

    values_ptr: Tensor  # [M, k] unquantized, int8 or float8_e4m3fn; as digits [2 × M, k]: all coarse ones, then all fine ones
    scale_ptr: Tensor | None  # float32 [M]; block_fp8: [ceil(k / group), M]; None: not quantized
    group_sums_ptr: Tensor | None  # float32 [groups, M]: digits against a grouped weight


class WeightPointers(NamedTuple):
    """Runtime: a quantized weight of n rows (with a gate 2 × n: gate rows, then up rows), for one linear or for each expert."""

    values_ptr: Tensor  # [(experts,) n, stride_weight]; see `QuantizedWeightFormat.form`
    scale_ptr: Tensor | None
    zero_ptr: Tensor | None  # zero points or offsets of groups, in the layout of the scales
    row_scale_ptr: (
        Tensor | None
    )  # float32 [(experts,) n] where `QuantizedWeightFormat.has_row_scale`: the sums of a row are multiplied by it


class OutputPointers(NamedTuple):
    """Runtime: the bias and the residual that are added to the product, and the memory for the result."""

    bias_ptr: Tensor | None  # [(experts,) n], [2 × n] with a gate
    residual_ptr: Tensor | None  # [m, n]
    out_ptr: Tensor  # [m, n]


class SplitKPointers(NamedTuple):
    """Runtime: memory through which the split-K slices of a tile are combined. None: one slice."""

    partial_ptr: Tensor | None  # float32 [tiles, splits, block_n (2 × with a gate), tokens]: the sums of each slice
    finished_ptr: Tensor | None  # int32 [tiles]: slices that have stored their sums; zero between launches


class UnquantizedRow(NamedTuple):
    """Runtime: the row of activations that each CTA quantizes for itself."""

    x_ptr: Tensor  # [k]
    norm_weight_ptr: Tensor | None  # [k]: weight of the RMS norm
    input_scale_ptr: Tensor | None  # float32 [1]: a static scale; None: from the row's largest magnitude


class QuantizedWeightFormat(NamedTuple):
    """Constants: how a weight is stored, and what a tile of it goes through before it is multiplied.

    form            values                       scale                                   weights are multiplied
    direct          dtype of the activations     float32 [n], or none                    as they are stored
    upcast          int8 or float8_e4m3fn        float32 [n]                             in the dtype of the activations
    block_fp8       float8_e4m3fn                float32 [ceil(n / block_rows), groups]  as they are stored, by float8_e4m3fn
    grouped_int8    int8                         [n, groups]                             as stored by digits, else in the activations' dtype
    int4            two per byte: `int4`         [groups, n]                             as int8 by digits, else in the activations' dtype
    fp4             four per word: `fp4`         int64 words: `fp4`                      in the activations' dtype

    groups = ceil(k / group). Experts have these shapes each.
    """

    form: str
    has_row_scale: bool  # of direct and upcast, whose scale it is, and of FP4 with a further one
    group: int  # input features that share a scale; 1: none do
    block_rows: int  # block_fp8: rows that share a scale
    zero: str  # zero kind of groups: "none", "int", "float" or "e2m1"; see `group_scales`


class GemmTile(NamedTuple):
    """Constants: the tile of one CTA."""

    tokens: int  # columns of the result
    block_n: int  # rows of the weight
    block_k: int  # input features per iteration
    groups: int  # groups (grouped_int8), pairs of groups (int4) or chunks of 64 features (fp4) within block_k; else 1
    splits: int  # split-K: CTAs that share the input features


class ProductFormat(NamedTuple):
    """Constants: how matrix operands are loaded and multiplied."""

    digits: int  # int8 digits of an activation: 2, or 1 when activations are not digits
    even_k: bool  # loads of activations and weights need no mask
    packed: bool  # True on a GPU: conversions by inline PTX; False in the interpreter: by the equivalent Triton operations
    imprecise: int | None  # float8 products: how many are accumulated in less than float32 (`max_num_imprecise_acc`)
    precision: str  # of tl.dot on float32: "ieee" or "tf32"


class QuantizeOptions(NamedTuple):
    """Constants: how each CTA quantizes the activations itself (see `activations`)."""

    norm: bool  # an RMS norm first
    limit: float  # the largest value
    chunk: int  # features in registers


class GemmSizes(NamedTuple):
    """Sizes and strides (in elements) of a product."""

    n: Any  # rows of the result's weight: without the up rows of a gated weight
    k: Any  # input features, as padded in the weight
    num_features: Any  # features that a row of activations has: int4 and grouped_int8 read zeros beyond them
    stride_x: Any
    stride_weight: Any
    stride_out: Any


class TokenTile(NamedTuple):
    """The TOKENS tokens of a tile. A product has DIGITS columns per token."""

    out_row: Any  # [TOKENS]: row of out
    inside: Any  # bool [TOKENS]: False for padding
    x_row: Any  # [TOKENS]: row of the scale and group sums of x; padding repeats the last token
    column_row: Any  # [DIGITS × TOKENS]: row of the values of x of each column
    column_inside: Any  # bool [DIGITS × TOKENS]: False for padding, which is not loaded
    num_rows: Any  # M: the number of tokens that x has


class WeightRows(NamedTuple):
    """The BLOCK_N rows of a tile."""

    row: Any  # [BLOCK_N]
    inside: Any  # bool [BLOCK_N]: False for padding
    load_row: Any  # int64 [BLOCK_N]: padding repeats row 0
    first: Any  # the number of the first row
