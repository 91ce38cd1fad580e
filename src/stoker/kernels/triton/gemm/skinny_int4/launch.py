"""The launch of `band_kernel`: some tokens, as 16-bit rows, against int4 that is read once."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized.launch import MAX_TILES, Stored, arrived, check_residual, without_layer_norm
from stoker.kernels.triton.gemm.skinny.launch import CHUNK_BYTES, is_whole
from stoker.kernels.triton.gemm.skinny_int4.kernel import arrange_kernel, band_kernel
from stoker.kernels.triton.gemm.skinny_int4.tiles import LARGEST_GROUP, MOST_TOKENS, skinny_int4_tile, token_tiles
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import SkinnyInt4Tile
from stoker.kernels.types import Fusion

XTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_CHUNK = 2048  # features of a token in registers at a time
_WHOLE = 16384  # features of a token that stay in registers


def takes(x: Tensor, stored: Stored) -> bool:
    """Whether `band` is for these rows: 16-bit, not more than it has columns for, against whole chunks of small groups.

    Larger groups' sums are scaled late in tiles, which costs less. Not in Triton's interpreter, which has no matrix instructions.
    """
    few = 0 < x.shape[0] <= MOST_TOKENS and stored.group <= LARGEST_GROUP
    return few and x.dtype in XTYPES and not x.is_cpu and is_whole(stored.weight)


def band(x: Tensor, stored: Stored, bias: Tensor | None, fusion: Fusion, tile: SkinnyInt4Tile | None = None) -> Tensor:
    """y [M, n] of x [M, K] against int4, norm and input gate on the way."""
    m, gated = x.shape[0], fusion.gate is not None
    n = stored.n // (2 if gated else 1)
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    chunks = stored.weight.shape[1] // CHUNK_BYTES
    n_tiles = token_tiles(m)
    given = arranged(x, stored, fusion, n_tiles)
    tile = tile or skinny_int4_tile(stored.group, m, n, chunks, gated, num_sms(x.device), device_tuning(x.device))
    grid = (triton.cdiv(n, 16 * tile.m_tiles * tile.num_warps // (2 if gated else 1)), tile.splits)
    partial = counters = None
    if tile.splits > 1:
        assert grid[0] <= MAX_TILES
        sums = 128 * tile.m_tiles * n_tiles * tile.num_warps
        partial = torch.empty((grid[0], tile.splits, sums), dtype=torch.float32, device=x.device)
        counters = arrived(x.device)
    band_kernel[grid](
        given, stored.weight, stored.scale, stored.zero, bias, fusion.residual, out, partial, counters,
        m, n, chunks, tile.splits, stored.weight.stride(0), stored.n,
        XTYPE=XTYPES[x.dtype], ZERO=stored.zero_kind, GROUP=stored.group, GATED=gated, ACT=fusion.gate or "silu",
        M_TILES=tile.m_tiles, N_TILES=n_tiles, WARPS=tile.num_warps, STAGES=tile.num_stages, SPLIT=tile.splits > 1,
        num_warps=tile.num_warps, **pdl_launch_options(x),
    )  # fmt: skip
    return out


def arranged(x: Tensor, stored: Stored, fusion: Fusion, tiles: int) -> Tensor:
    """x [M, K], normed and gated, in the order in which lanes read it: [8 × tiles, padded K] elements. Rows from M on stay unwritten."""
    x, fusion = without_layer_norm(x, fusion)
    out = torch.empty((8 * tiles, stored.k), dtype=x.dtype, device=x.device)
    is_normed = fusion.norm_weight is not None
    whole = max(128, triton.next_power_of_2(stored.k))
    chunk = whole if is_normed and whole <= _WHOLE else min(whole, _CHUNK)
    arrange_kernel[(x.shape[0], 1 if is_normed else triton.cdiv(stored.k, chunk))](
        x, fusion.norm_weight, out, x.shape[1] // (1 if fusion.input_gate is None else 2), stored.k, x.stride(0), fusion.norm_eps,
        NORM=is_normed, TOKEN_TILES=tiles, GROUP=stored.group, GATE=fusion.input_gate, CHUNK=chunk, WHOLE=is_normed and chunk == whole,
        num_warps=min(16, max(1, chunk // 512)), **pdl_launch_options(x),
    )  # fmt: skip
    return out
