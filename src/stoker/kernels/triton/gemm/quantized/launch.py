"""The launches that quantized linears share: one function per form of the activations.

quantized_activation_linear    FP8, int8 or digits with a scale per token; weights are multiplied as they are stored
block_fp8_activation_linear    FP8 with a scale per token and group of features
plain_activation_linear        unquantized; weights are dequantized in registers
dequantized_linear             unquantized; weights are dequantized in memory for the library's GEMM
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton import activation, norm
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized.activations import (
    LARGEST_VALUES,
    empty_activations,
    quantize_groups,
    quantize_rows,
)
from stoker.kernels.triton.gemm.quantized.arguments import (
    ActivationPointers,
    GemmTile,
    OutputPointers,
    ProductFormat,
    QuantizedWeightFormat,
    QuantizeOptions,
    SplitKPointers,
    UnquantizedRow,
    WeightPointers,
)
from stoker.kernels.triton.gemm.quantized.fp4 import CHUNK
from stoker.kernels.triton.gemm.quantized.kernel import quantized_linear_kernel
from stoker.kernels.triton.gemm.quantized.tiles import (
    MAX_SKINNY_ROWS,
    dequantizing_tile,
    large_tile,
    one_round_tile,
    padded_tokens,
    quant_tile,
)
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import Fusion

MAX_COLUMNS = 128  # of a tile: tokens × digits × 2 for a gate
MAX_TILES = 1 << 16  # of a launch with split-K
_CHUNK = 4096  # features in registers when a CTA quantizes its activations
_SCRATCH_BYTES = 128 << 20  # of a dequantized weight


def quantized_activation_linear(
    x: Tensor, weight: PackedWeight, form: str, tuning_key: str, fusion: Fusion, tile: QuantTile | None = None
) -> Tensor:
    """A linear with x quantized as `form` (fp8, int8 or digits) with a scale per token.

    `tuning_key` is the dtype whose rows of the tuning table have the tiles; `tile` overrides them.
    """
    x, fusion = apply_unfused_norm(x, fusion)
    digits = 2 if form == "digits" else 1
    gated = fusion.gate is not None
    max_tokens = MAX_COLUMNS // digits // (2 if gated else 1)
    n, k, group = weight.out_features // (2 if gated else 1), weight.in_features, weight.group_size
    rows = 1 if x.shape[0] == 1 else padded_tokens(x.shape[0])
    if tile is None and x.shape[0] <= MAX_SKINNY_ROWS:
        tile = quant_tile(tuning_key, rows, n, k, gated, num_sms(x.device), device_tuning(x.device), group)
    elif tile is None and (tile := one_round_linear_tile(x, weight, form, fusion)) is not None:
        max_tokens = MAX_SKINNY_ROWS
    elif tile is None:
        tile = large_tile(max_tokens, 1, group, k)
    tokens = min(padded_tokens(x.shape[0], digits, tile.columns), max_tokens)
    unquantized = None
    if tile.encode and x.shape[0] == 1:
        x, fusion = apply_input_gate(x, fusion)
        quantized, unquantized = empty_activations(x, form, k, group), x
    else:
        quantized = quantize_rows(x, form, k, group, fusion.norm_weight, fusion.norm_eps, weight.input_scale, fusion.input_gate)
    operand = ActivationPointers(quantized.values, quantized.scale, quantized.group_sums)
    return launch(operand, weight, tile, fusion, x, tokens, digits, unquantized, LARGEST_VALUES[form])


def one_round_linear_tile(x: Tensor, weight: PackedWeight, form: str, fusion: Fusion) -> QuantTile | None:
    """The tile of `one_round_tile` for a linear of x [m, k] quantized as `form` (fp8, int8 or digits).

    None: m is at most MAX_SKINNY_ROWS, not all tiles would run at the same time, or digits or groups of features need other tiles.
    """
    if x.shape[0] <= MAX_SKINNY_ROWS or form == "digits" or weight.group_size:
        return None
    gated = fusion.gate is not None
    n = weight.out_features // (2 if gated else 1)
    return one_round_tile(x.shape[0], n, weight.in_features, gated, num_sms(x.device), device_tuning(x.device))


def block_fp8_activation_linear(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: QuantTile | None = None) -> Tensor:
    """A linear with x quantized to float8_e4m3fn with a scale for each group of features, for any number of rows."""
    x = apply_input_fusion(x, fusion)
    quantized = quantize_groups(x, weight.group_size)
    gated = fusion.gate is not None
    max_tokens = MAX_COLUMNS // (2 if gated else 1)
    if tile is None and x.shape[0] <= MAX_SKINNY_ROWS:
        n, rows = weight.out_features // (2 if gated else 1), padded_tokens(x.shape[0])
        tile = quant_tile("block", rows, n, weight.in_features, gated, num_sms(x.device), device_tuning(x.device))
    tile = tile or large_tile(max_tokens, 1)
    tokens = min(padded_tokens(x.shape[0], 1, tile.columns), max_tokens)
    operand = ActivationPointers(quantized.values, quantized.scale, None)
    return launch(operand, weight, tile, replace(fusion, norm_kind=None), x, tokens)


def plain_activation_linear(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: QuantTile | None = None) -> Tensor:
    """A linear with unquantized x: each tile of the weight is converted to the dtype of x in registers."""
    x = apply_input_fusion(x, fusion)
    gated = fusion.gate is not None
    tokens = min(padded_tokens(x.shape[0]), MAX_COLUMNS // (2 if gated else 1))
    k, group = weight.in_features, weight.group_size
    if tile is None and weight.format == "int4" and x.element_size() == 2:
        tile = dequantizing_tile(tokens, weight.out_features // (2 if gated else 1), k, group, gated, num_sms(x.device))
    tile = tile or large_tile(tokens, x.element_size(), group, k)
    return launch(ActivationPointers(x, None, None), weight, tile, replace(fusion, norm_kind=None), x, tokens)


def dequantized_linear(x: Tensor, weight: PackedWeight, dequantize: Callable[[int, int], Tensor], fusion: Fusion) -> Tensor:
    """A linear by the library's GEMM over a range of rows of the weight at a time.

    `dequantize(first, last)` returns rows first : last of the weight in the dtype of x.
    """
    x, n, bias = apply_input_fusion(x, fusion), weight.out_features, weight.bias
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    step = max(128, _SCRATCH_BYTES // (x.shape[1] * x.element_size()) // 128 * 128)
    for first in range(0, n, step):
        last = min(n, first + step)
        torch.mm(x, dequantize(first, last).t(), out=out[:, first:last])
    return apply_output_fusion(out if bias is None else out.add_(bias), fusion)


def launch(
    operand: ActivationPointers,
    weight: PackedWeight,
    tile: QuantTile,
    fusion: Fusion,
    x: Tensor,
    tokens: int,
    digits: int = 1,
    unquantized: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Launch the kernel once for all rows of x, in tiles of `tokens` rows. `operand` is x in the form in which it is multiplied.

    `digits` is 2 if `operand` consists of two int8 digits per value, otherwise 1. With `unquantized` [1, k], the kernel quantizes this row
    into `operand` with values of at most `limit`, after the RMS norm of `fusion`. Without it, the caller has applied the norm.
    """
    m = x.shape[0]
    gated = fusion.gate is not None
    n, k = weight.out_features // (2 if gated else 1), weight.in_features
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    values = operand.values_ptr
    m_tiles = cdiv(m, tokens)
    num_tiles = m_tiles * cdiv(n, tile.block_n)
    weight_format = quantized_weight_format(values, weight)
    tile_shape = gemm_tile(weight_format, tile, tokens, num_tiles)
    row = options = None
    if unquantized is not None:
        norm_weight = fusion.norm_weight if fusion.norm_kind else None
        row = UnquantizedRow(unquantized, norm_weight, weight.input_scale)
        options = QuantizeOptions(norm_weight is not None, limit, min(_CHUNK, max(next_power_of_2(k), 128)))
    quantized_linear_kernel[(num_tiles, tile_shape.splits)](
        operand,
        weight_pointers(weight, weight_format),
        OutputPointers(weight.bias, fusion.residual, out),
        split_k_pointers(num_tiles, tile_shape, gated, x.device),
        row,
        m,
        m_tiles,
        n,
        k,
        values.stride(0),
        weight.values.stride(0),
        n,
        x.shape[1],
        fusion.norm_eps,
        FORMAT=weight_format,
        TILE=tile_shape,
        PRODUCT=product_format(values, weight_format, k, tile_shape, digits),
        QUANTIZE=options,
        GATED=gated,
        ACTIVATION=fusion.gate or "silu",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch_options(x),
    )
    return out


def quantized_weight_format(values: Tensor, weight: PackedWeight) -> QuantizedWeightFormat:
    """The constants FORMAT for a weight that is multiplied by the activations `values`."""
    form = _weight_form(values, weight)
    has_row_scale = weight.row_scale is not None or (form in ("direct", "upcast") and weight.scale is not None)
    return QuantizedWeightFormat(form, has_row_scale, max(1, weight.group_size), weight.block_rows, weight.zero_kind)


def weight_pointers(weight: PackedWeight, weight_format: QuantizedWeightFormat) -> WeightPointers:
    """The pointers of a weight with the constants `weight_format`."""
    row_scale = (weight.row_scale if weight.is_fp4 else weight.scale) if weight_format.has_row_scale else None
    return WeightPointers(weight.values, weight.scale, weight.zero, row_scale)


def _weight_form(values: Tensor, weight: PackedWeight) -> str:
    """The field `form` of QuantizedWeightFormat."""
    if weight.format == "int4":
        return "fp4" if weight.layout == "quads" else "int4"
    if weight.group_size:
        return "block_fp8" if weight.format == "fp8" else "grouped_int8"
    return "direct" if values.dtype == weight.values.dtype else "upcast"


def gemm_tile(weight_format: QuantizedWeightFormat, tile: QuantTile, tokens: int, num_tiles: int) -> GemmTile:
    """The constants TILE of a launch with `num_tiles` tiles of `tokens` tokens."""
    form, group = weight_format.form, weight_format.group
    block_k = group if form == "block_fp8" else tile.block_k
    features = {"int4": 2 * group, "grouped_int8": group, "fp4": CHUNK}.get(form, block_k)
    groups = block_k // features
    return GemmTile(tokens, tile.block_n, block_k, groups, tile.splits if num_tiles <= MAX_TILES else 1)


def product_format(values: Tensor, weight_format: QuantizedWeightFormat, k: int, tile: GemmTile, digits: int) -> ProductFormat:
    """The constants PRODUCT for the activations `values` and a weight of k input features."""
    is_fp8_product = values.dtype == torch.float8_e4m3fn and weight_format.form != "upcast"
    return ProductFormat(
        digits=digits,
        even_k=k % tile.block_k == 0 and values.shape[1] >= k,
        packed=not values.is_cpu,
        imprecise=tile.block_k if is_fp8_product else None,
        precision="ieee" if values.dtype == torch.float32 else "tf32",
    )


def split_k_pointers(num_tiles: int, tile: GemmTile, gated: bool, device: torch.device) -> SplitKPointers:
    """Memory for the split-K slices of a launch with `num_tiles` tiles."""
    if tile.splits == 1:
        return SplitKPointers(None, None)
    partial = torch.empty((num_tiles, tile.splits, (2 if gated else 1) * tile.block_n, tile.tokens), dtype=torch.float32, device=device)
    return SplitKPointers(partial, split_counters(device))


@cache
def split_counters(device: torch.device) -> Tensor:
    """Counters of finished split-K slices, one int32 per tile: zero after every launch. The launches of a device run one after another."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def apply_unfused_norm(x: Tensor, fusion: Fusion) -> tuple[Tensor, Fusion]:
    """(x, remaining fusion), after applying a norm that the quantization kernel does not support, with the input gate before it."""
    if not fusion.needs_separate_norm:
        return x, fusion
    return apply_input_fusion(x, fusion), replace(fusion, norm_kind=None, norm_weight=None, input_gate=None)


def apply_input_gate(x: Tensor, fusion: Fusion) -> tuple[Tensor, Fusion]:
    """(x, remaining fusion), after applying the fusion's input gate, if it has one."""
    return (x, fusion) if fusion.input_gate is None else (activation.gated(x, fusion.input_gate), replace(fusion, input_gate=None))


def apply_input_fusion(x: Tensor, fusion: Fusion) -> Tensor:
    """x after the fusion's input gate and norm."""
    x, fusion = apply_input_gate(x, fusion)
    if fusion.norm_kind is None:
        return x
    return norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)


def apply_output_fusion(y: Tensor, fusion: Fusion) -> Tensor:
    """y after the fusion's output gate and residual. May overwrite y."""
    if fusion.gate is not None:
        y = activation.gated(y, fusion.gate)
    return y if fusion.residual is None else y.add_(fusion.residual)


def check_residual(fusion: Fusion, m: int, n: int) -> None:
    """Raise ValueError unless the fusion's residual is absent or contiguous [m, n]."""
    if fusion.residual is not None and (fusion.residual.shape != (m, n) or not fusion.residual.is_contiguous()):
        raise ValueError(
            f"residual of shape {tuple(fusion.residual.shape)} and strides {fusion.residual.stride()}: must be contiguous [{m}, {n}]"
        )
