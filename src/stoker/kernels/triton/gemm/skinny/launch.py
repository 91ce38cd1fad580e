"""Launches the skinny GEMM: 1 to 8 tokens, quantized first, against a quantized weight of 4 or 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.gemm.quantized.launch import MAX_TILES, apply_unfused_norm, check_residual, split_counters
from stoker.kernels.triton.gemm.skinny.arguments import Epilogue, QuantizedTokens, QuantizedWeight, SplitKScratch, TileShape, WeightFormat
from stoker.kernels.triton.gemm.skinny.kernel import skinny_gemm_kernel
from stoker.kernels.triton.gemm.skinny.tiles import MAX_TOKENS, MAX_TOKENS_SMALL_GROUPS, column_tiles, skinny_tile
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import SkinnyTile
from stoker.kernels.types import Fusion

ACTIVATION_FORMS = {"int4": "digits", "int8": "digits", "fp8": "fp8"}  # the format of the weight → what x is quantized to
CHUNK_BYTES = 64
MIN_GROUP = 32  # of int4: the 16 bytes of a lane belong to one pair of groups


def supports_skinny(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `skinny_linear` supports these activations and weight: at most MAX_TOKENS tokens, rows of whole chunks, no FP4."""
    max_tokens = MAX_TOKENS
    if weight.is_fp4:
        return False
    if weight.format == "int4":
        group = weight.group_size
        max_tokens = 0 if group < MIN_GROUP else MAX_TOKENS_SMALL_GROUPS if group < CHUNK_BYTES else MAX_TOKENS
    return 0 < x.shape[0] <= max_tokens and has_whole_chunks(weight.values)


def has_whole_chunks(weight: Tensor) -> bool:
    """Whether the rows of a weight [n, bytes] consist of whole chunks and are aligned to 16 bytes."""
    return weight.shape[1] % CHUNK_BYTES == 0 and weight.stride(0) % 16 == 0 and weight.stride(1) == 1


def skinny_linear(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: SkinnyTile | None = None) -> Tensor:
    """[m, n]: a linear with x [m, k] and a weight that `supports_skinny` accepts. `tile` overrides the tuned choice.

    The launch that quantizes x also applies the norm and the input gate.
    """
    x, fusion = apply_unfused_norm(x, fusion)
    values, group, activations = weight.values, weight.group_size, ACTIVATION_FORMS[weight.format]
    tokens = quantize_rows(
        x, activations, weight.in_features, group, fusion.norm_weight, fusion.norm_eps, weight.input_scale, fusion.input_gate
    )
    gated, m = fusion.gate is not None, x.shape[0]
    n = weight.out_features // (2 if gated else 1)
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    digits = 2 if activations == "digits" else 1
    num_chunks = values.shape[1] // max(group, CHUNK_BYTES)
    tile = tile or skinny_tile(weight.format, m, n, num_chunks, gated, num_sms(x.device), device_tuning(x.device))
    columns = column_tiles(m, digits)
    grid = (cdiv(n, 16 * tile.m_tiles // (2 if gated else 1)), tile.splits, cdiv(m * digits, 8 * columns))
    scratch = SplitKScratch(None, None)
    if tile.splits > 1:
        num_tiles = grid[0] * grid[2]
        assert num_tiles <= MAX_TILES
        sums = 128 * tile.m_tiles * columns // digits
        partial = torch.empty((num_tiles, tile.splits, sums), dtype=torch.float32, device=x.device)
        scratch = SplitKScratch(partial, split_counters(x.device))
    skinny_gemm_kernel[grid](
        QuantizedTokens(tokens.values, tokens.scale, tokens.group_sums, tokens.values.stride(0)),
        QuantizedWeight(values, weight.scale, weight.zero, values.stride(0), weight.out_features),
        Epilogue(weight.bias, fusion.residual, out),
        scratch,
        m,
        n,
        num_chunks,
        tile.splits,
        FORMAT=WeightFormat(weight.format, weight.zero_kind, max(group, 1)),
        TILE=TileShape(tile.m_tiles, columns, tile.num_warps, tile.num_stages, tile.splits > 1),
        GATED=gated,
        ACTIVATION=fusion.gate or "silu",
        IN_REGISTERS=not x.is_cpu,
        num_warps=tile.num_warps,
        **pdl_launch_options(x),
    )
    return out
