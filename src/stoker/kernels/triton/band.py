"""The launch of `band_kernel`: some tokens against a weight that is read once, as plain 16-bit rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from stoker.kernels.triton.band_kernel import arrange_kernel, band_kernel
from stoker.kernels.triton.band_tuning import MOST_TOKENS, BandTile, band_tile, token_tiles
from stoker.kernels.triton.chain import chained
from stoker.kernels.triton.device import num_multiprocessors
from stoker.kernels.triton.quant_linear import MAX_TILES, Stored, arrived, check_residual, normed, without_layer_norm
from stoker.kernels.triton.stream import CHUNK_BYTES, XTYPES, aligned, is_whole
from stoker.kernels.types import Fusion

_CHUNK = 4096  # features of a token in registers at a time
_WHOLE = 16384  # features of a token that stay in registers


def takes(x: Tensor, stored: Stored) -> bool:
    """Whether `band` is for these rows: not more than it has columns for, 16-bit, against a weight of whole chunks.

    Not in Triton's interpreter, which has no matrix instructions.
    """
    return 0 < x.shape[0] <= MOST_TOKENS and x.dtype in XTYPES and not x.is_cpu and is_whole(stored)


def band(x: Tensor, form: str, stored: Stored, bias: Tensor | None, fusion: Fusion, tile: BandTile | None = None) -> Tensor:
    """y [M, n] of x [M, K], norm and input gate on the way. `form`: int4 or same."""
    m, gated = x.shape[0], fusion.gate is not None
    n = stored.n // (2 if gated else 1)
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    weight = stored.weight
    row_bytes = weight.shape[1] * weight.element_size()
    chunks = row_bytes // max(stored.group, CHUNK_BYTES)
    n_tiles = token_tiles(m)
    tiles = triton.cdiv(m, 8 * n_tiles) * n_tiles
    given = arranged(x, stored, fusion, tiles) if form == "int4" else aligned(normed(x, fusion))
    tile = tile or band_tile(form, m, n, chunks, gated, num_multiprocessors(x.device))
    grid = (triton.cdiv(n, 16 * tile.m_tiles * tile.num_warps // (2 if gated else 1)), tile.splits, tiles // n_tiles)
    partial = counters = None
    if tile.splits > 1:
        assert grid[0] * grid[2] <= MAX_TILES
        sums = 128 * tile.m_tiles * n_tiles * tile.num_warps
        partial = torch.empty((grid[0] * grid[2], tile.splits, sums), dtype=torch.float32, device=x.device)
        counters = arrived(x.device)
    band_kernel[grid](
        given, weight, stored.scale, stored.zero, bias, fusion.residual, out, partial, counters,
        m, n, chunks, tile.splits, tiles, given.stride(0), weight.stride(0) * weight.element_size(), stored.n,
        FORM=form, XTYPE=XTYPES[x.dtype], ZERO=stored.zero_kind, GROUP=max(stored.group, 1), GATED=gated, ACT=fusion.gate or "silu",
        M_TILES=tile.m_tiles, N_TILES=n_tiles, WARPS=tile.num_warps, STAGES=tile.num_stages, SPLIT=tile.splits > 1,
        num_warps=tile.num_warps, **chained(x),
    )  # fmt: skip
    return out


def arranged(x: Tensor, stored: Stored, fusion: Fusion, tiles: int) -> Tensor:
    """x [M, K], normed and gated, in the order in which lanes read it: [8 × tiles, padded K] elements. Rows from M on stay unwritten."""
    x, fusion = without_layer_norm(x, fusion)
    out = torch.empty((8 * tiles, stored.k), dtype=x.dtype, device=x.device)
    whole = max(128, triton.next_power_of_2(stored.k))
    chunk = whole if whole <= _WHOLE else _CHUNK
    arrange_kernel[(x.shape[0],)](
        x, fusion.norm_weight, out, tiles, x.shape[1] // (1 if fusion.input_gate is None else 2), stored.k, x.stride(0), fusion.norm_eps,
        NORM=fusion.norm_weight is not None, GROUP=stored.group, GATE=fusion.input_gate, CHUNK=chunk, WHOLE=chunk == whole,
        num_warps=min(16, max(1, chunk // 512)), **chained(x),
    )  # fmt: skip
    return out
