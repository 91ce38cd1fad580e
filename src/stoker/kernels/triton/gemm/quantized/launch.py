"""The launch that quantized linears share: activations made into what the weights are multiplied by, then one streaming kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import triton
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton import activation, norm
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized.activations import LIMITS, Codes, empty_codes, encode_groups, encode_rows
from stoker.kernels.triton.gemm.quantized.kernel import quant_linear_kernel
from stoker.kernels.triton.gemm.quantized.tiles import FEW_ROWS, middle_tile, padded_tokens, quant_tile, widened_tile
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import Fusion

MOST_TOKENS = 128  # of one tile
MAX_TILES = 1 << 16
_CHUNK = 4096
_SCRATCH_BYTES = 128 << 20  # of a weight widened for the library's GEMM


def few_rows(x: Tensor, weight: PackedWeight, codes: str, tuned: str, fusion: Fusion, tile: QuantTile | None = None) -> Tensor:
    """Rows as `codes` (fp8, int8, digits), against weights streamed once for each FEW_ROWS of them. `tuned`: whose table of tiles."""
    x, fusion = without_layer_norm(x, fusion)
    digits = 2 if codes == "digits" else 1
    gated = fusion.gate is not None
    most = MOST_TOKENS // digits // (2 if gated else 1)
    n, k = weight.out_features // (2 if gated else 1), weight.in_features
    rows = 1 if x.shape[0] == 1 else padded_tokens(x.shape[0])
    if tile is None and x.shape[0] <= FEW_ROWS:
        tile = quant_tile(tuned, rows, n, k, gated, num_sms(x.device), device_tuning(x.device), weight.group_size)
    elif tile is None:
        tile = middle_tile(most, 1, weight.group_size, k)
    tokens = min(padded_tokens(x.shape[0], digits, tile.columns), most)
    made: Codes
    raw = None
    if tile.encode and x.shape[0] == 1:
        x, fusion = ungated(x, fusion)
        made, raw = empty_codes(x, codes, k, weight.group_size), x
    else:
        made = encode_rows(x, codes, k, weight.group_size, fusion.norm_weight, fusion.norm_eps, weight.input_scale, fusion.input_gate)
    return launch(
        made.codes, weight, tile, fusion, x, tokens, row_scale=made.scale, sums=made.sums, digits=digits, raw=raw, limit=LIMITS[codes]
    )


def block_rows(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: QuantTile | None = None) -> Tensor:
    """e4m3 rows with a scale for each group of features, as many as there are."""
    x = normed(x, fusion)
    made = encode_groups(x, weight.group_size)
    gated = fusion.gate is not None
    most = MOST_TOKENS // (2 if gated else 1)
    if tile is None and x.shape[0] <= FEW_ROWS:
        n = weight.out_features // (2 if gated else 1)
        rows = padded_tokens(x.shape[0])
        tile = quant_tile("block", rows, n, weight.in_features, gated, num_sms(x.device), device_tuning(x.device))
    tile = tile or middle_tile(most, 1)
    tokens = min(padded_tokens(x.shape[0], 1, tile.columns), most)
    return launch(made.codes, weight, tile, replace(fusion, norm_kind=None), x, tokens, row_scale=made.scale)


def plain_rows(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: QuantTile | None = None) -> Tensor:
    """Rows as they are: a tile of weights becomes their dtype in registers."""
    x = normed(x, fusion)
    tokens = min(padded_tokens(x.shape[0]), MOST_TOKENS // (1 if fusion.gate is None else 2))
    if tile is None and weight.format == "int4" and x.element_size() == 2:
        n = weight.out_features // (1 if fusion.gate is None else 2)
        tile = widened_tile(tokens, n, weight.in_features, weight.group_size, fusion.gate is not None, num_sms(x.device))
    tile = tile or middle_tile(tokens, x.element_size(), weight.group_size, weight.in_features)
    return launch(x, weight, tile, replace(fusion, norm_kind=None), x, tokens)


def many_rows(x: Tensor, weight: PackedWeight, widen: Callable[[int, int], Tensor], fusion: Fusion) -> Tensor:
    """The library's GEMM over a weight widened some rows at a time: widen(first, last) gives those rows in x's dtype."""
    x, n, bias = normed(x, fusion), weight.out_features, weight.bias
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    step = max(128, _SCRATCH_BYTES // (x.shape[1] * x.element_size()) // 128 * 128)
    for first in range(0, n, step):
        last = min(n, first + step)
        torch.mm(x, widen(first, last).t(), out=out[:, first:last])
    return after(out if bias is None else out.add_(bias), fusion)


def launch(
    x: Tensor, weight: PackedWeight, tile: QuantTile, fusion: Fusion, like: Tensor, tokens: int, *,
    row_scale: Tensor | None = None, sums: Tensor | None = None, digits: int = 1, raw: Tensor | None = None, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """One launch over all of `like`'s rows. `fusion`'s norm counts only where `raw` is encoded by the kernel."""
    m = like.shape[0]
    gated = fusion.gate is not None
    n, k = weight.out_features // (2 if gated else 1), weight.in_features
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=like.dtype, device=like.device)
    if m == 0:
        return out
    m_tiles = triton.cdiv(m, tokens)
    programs = m_tiles * triton.cdiv(n, tile.block_n)
    splits = tile.splits if programs <= MAX_TILES else 1
    partial = counters = None
    if splits > 1:
        partial = torch.empty((programs, splits, (2 if gated else 1) * tile.block_n, tokens), dtype=torch.float32, device=like.device)
        counters = arrived(like.device)
    norm_weight = fusion.norm_weight if raw is not None and fusion.norm_kind else None
    quant_linear_kernel[(programs, splits)](
        x, row_scale, sums, weight.values, weight.scale, weight.zero, weight.bias, fusion.residual, out, partial, counters,
        raw, norm_weight, weight.input_scale, None, None,
        m, m_tiles, n, k, x.stride(0), weight.values.stride(-2), n, like.shape[1], fusion.norm_eps,
        GATED=gated, ACT=fusion.gate or "silu", SPLITS=splits, DIGITS=digits, TOKENS=tokens,
        EXPERTS=0, EXPERT_BLOCK=1, TOP_K=0, SCATTER=False,
        ENCODE=raw is not None, NORM=norm_weight is not None, LIMIT=limit,
        CHUNK=min(_CHUNK, max(triton.next_power_of_2(k), 128)),
        **flags(x, weight, tile), **pdl_launch_options(like),
    )  # fmt: skip
    return out


def kernel_form(x: Tensor, weight: PackedWeight) -> str:
    """The kernel's FORM: how it multiplies an operand x with a weight.

    int4 and groups (int8): each group's product is scaled. block: each block's. same: operand and weight have one dtype. wide: values are
    widened to x's dtype.
    """
    if weight.format == "int4":
        return "int4"
    if weight.group_size:
        return "block" if weight.format == "fp8" else "groups"
    return "same" if x.dtype == weight.values.dtype else "wide"


def flags(x: Tensor, weight: PackedWeight, tile: QuantTile) -> dict[str, object]:
    """The kernel's constants that follow from the weight, the operand and the tile."""
    form, group, k = kernel_form(x, weight), weight.group_size, weight.in_features
    block_k = group if form == "block" else tile.block_k
    units = block_k // (group * (2 if form == "int4" else 1)) if form in ("int4", "groups") else 1
    return {
        "FORM": form,
        "BY_ROW": form in ("same", "wide") and weight.scale is not None,
        "GROUP": max(1, group),
        "BLOCK_ROWS": weight.block_rows,
        "UNITS": units,
        "ZERO": weight.zero_kind,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "EVEN_K": k % block_k == 0 and x.shape[1] >= k,
        "PACKED": not x.is_cpu,
        "IMPRECISE": block_k if x.dtype == torch.float8_e4m3fn and form != "wide" else None,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def without_layer_norm(x: Tensor, fusion: Fusion) -> tuple[Tensor, Fusion]:
    """A norm that needs a pass of its own applied, and the gate before it; an RMS norm left to the encoding."""
    if not fusion.needs_separate_norm:
        return x, fusion
    return normed(x, fusion), replace(fusion, norm_kind=None, norm_weight=None, input_gate=None)


def ungated(x: Tensor, fusion: Fusion) -> tuple[Tensor, Fusion]:
    """The input's gate applied."""
    return (x, fusion) if fusion.input_gate is None else (activation.gated(x, fusion.input_gate), replace(fusion, input_gate=None))


def normed(x: Tensor, fusion: Fusion) -> Tensor:
    """x as the product takes it: the input's gate and the norm applied."""
    x, fusion = ungated(x, fusion)
    if fusion.norm_kind is None:
        return x
    return norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)


def after(y: Tensor, fusion: Fusion) -> Tensor:
    """The fusion's gate and residual, for products that a library made."""
    if fusion.gate is not None:
        y = activation.gated(y, fusion.gate)
    return y if fusion.residual is None else y.add_(fusion.residual)


def check_residual(fusion: Fusion, m: int, n: int) -> None:
    if fusion.residual is not None and (fusion.residual.shape != (m, n) or not fusion.residual.is_contiguous()):
        raise ValueError(f"the residual must be dense [{m}, {n}]; it is {tuple(fusion.residual.shape)}")


@cache
def arrived(device: torch.device) -> Tensor:
    """Counters of finished splits, one a tile; every launch leaves them at zero. Launches of one device run one after another."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
