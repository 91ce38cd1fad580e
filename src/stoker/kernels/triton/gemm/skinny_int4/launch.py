"""Launches the int4 skinny GEMM: 1 to 64 tokens of 16 bits against int4 in groups of up to 64 features."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized.launch import MAX_TILES, apply_unfused_norm, check_residual, split_counters
from stoker.kernels.triton.gemm.skinny.arguments import Epilogue, QuantizedWeight, SplitKScratch, TileShape, WeightFormat
from stoker.kernels.triton.gemm.skinny.launch import CHUNK_BYTES, has_whole_chunks
from stoker.kernels.triton.gemm.skinny_int4.arrange import arrange_tokens_kernel
from stoker.kernels.triton.gemm.skinny_int4.kernel import skinny_int4_gemm_kernel
from stoker.kernels.triton.gemm.skinny_int4.tiles import MAX_GROUP, MAX_TOKENS, skinny_int4_tile, token_tiles
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import SkinnyInt4Tile
from stoker.kernels.types import Fusion

XTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_CHUNK = 2048  # features of a token in registers at a time
_MAX_WHOLE_ROW = 16384  # features of a token that stay in registers


def supports_skinny_int4(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `skinny_int4_linear` supports these activations and weight: 16 bits, at most MAX_TOKENS tokens, groups of at most MAX_GROUP.

    With larger groups, tiles in shared memory are faster: they scale the sums of a group instead of its values. False for Triton's
    interpreter, which has no matrix instructions.
    """
    is_supported = 0 < x.shape[0] <= MAX_TOKENS and weight.group_size <= MAX_GROUP
    return is_supported and x.dtype in XTYPES and not x.is_cpu and has_whole_chunks(weight.values)


def skinny_int4_linear(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: SkinnyInt4Tile | None = None) -> Tensor:
    """[m, n]: a linear with x [m, k] and an int4 weight that `supports_skinny_int4` accepts. `tile` overrides the tuned choice.

    `arrange_tokens` applies the norm and the input gate.
    """
    m, gated = x.shape[0], fusion.gate is not None
    n = weight.out_features // (2 if gated else 1)
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    num_chunks = weight.values.shape[1] // CHUNK_BYTES
    columns = token_tiles(m)
    tokens = arrange_tokens(x, weight, fusion, columns)
    tile = tile or skinny_int4_tile(weight.group_size, m, n, num_chunks, gated, num_sms(x.device), device_tuning(x.device))
    grid = (cdiv(n, 16 * tile.m_tiles * tile.num_warps // (2 if gated else 1)), tile.splits)
    scratch = SplitKScratch(None, None)
    if tile.splits > 1:
        assert grid[0] <= MAX_TILES
        sums = 128 * tile.m_tiles * columns * tile.num_warps
        partial = torch.empty((grid[0], tile.splits, sums), dtype=torch.float32, device=x.device)
        scratch = SplitKScratch(partial, split_counters(x.device))
    skinny_int4_gemm_kernel[grid](
        tokens,
        QuantizedWeight(weight.values, weight.scale, weight.zero, weight.values.stride(0), weight.out_features, weight.row_scale),
        Epilogue(weight.bias, fusion.residual, out),
        scratch,
        m,
        n,
        num_chunks,
        tile.splits,
        FORMAT=WeightFormat("int4", weight.zero_kind, weight.group_size),
        TILE=TileShape(tile.m_tiles, columns, tile.num_warps, tile.num_stages, tile.splits > 1),
        XTYPE=XTYPES[x.dtype],
        GATED=gated,
        ACTIVATION=fusion.gate or "silu",
        num_warps=tile.num_warps,
        **pdl_launch_options(x),
    )
    return out


def arrange_tokens(x: Tensor, weight: PackedWeight, fusion: Fusion, tiles: int) -> Tensor:
    """x [m, k] after the norm and the input gate, in the layout of `arrange`: [8 × tiles, padded k] elements."""
    x, fusion = apply_unfused_norm(x, fusion)
    out = torch.empty((8 * tiles, weight.in_features), dtype=x.dtype, device=x.device)
    has_norm = fusion.norm_weight is not None
    whole_row = max(128, next_power_of_2(weight.in_features))
    chunk = whole_row if has_norm and whole_row <= _MAX_WHOLE_ROW else min(whole_row, _CHUNK)
    arrange_tokens_kernel[(x.shape[0], 1 if has_norm else cdiv(weight.in_features, chunk))](
        x,
        fusion.norm_weight,
        out,
        x.shape[1] // (1 if fusion.input_gate is None else 2),
        weight.in_features,
        x.stride(0),
        fusion.norm_eps,
        NORM=has_norm,
        TOKEN_TILES=tiles,
        GROUP=weight.group_size,
        GATE=fusion.input_gate,
        CHUNK=chunk,
        WHOLE_ROW=has_norm and chunk == whole_row,
        num_warps=min(16, max(1, chunk // 512)),
        **pdl_launch_options(x),
    )
    return out
