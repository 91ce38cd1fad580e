"""The launch of `stream_kernel`: few tokens against a weight that is read once, in the order in which it lies."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized.activations import encode_rows
from stoker.kernels.triton.gemm.quantized.launch import MAX_TILES, Stored, arrived, check_residual, without_layer_norm
from stoker.kernels.triton.gemm.skinny.kernel import stream_kernel
from stoker.kernels.triton.gemm.skinny.tiles import MOST_OF_SMALL_GROUPS, MOST_TOKENS, skinny_tile, token_tiles
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import SkinnyTile
from stoker.kernels.types import Fusion

CODES = {"int4": "digits", "bytes": "digits", "fp8": "fp8"}  # what x becomes
CHUNK_BYTES = 64
SMALLEST_GROUP = 32  # of int4: a lane's 16 bytes are of one pair of groups, a chunk's of one or two


def takes(x: Tensor, form: str, stored: Stored) -> bool:
    """Whether `stream` is for these rows: few, and against a weight of whole chunks."""
    most = MOST_TOKENS
    if form == "int4":
        most = 0 if stored.group < SMALLEST_GROUP else MOST_OF_SMALL_GROUPS if stored.group < CHUNK_BYTES else MOST_TOKENS
    return 0 < x.shape[0] <= most and is_whole(stored.weight)


def is_whole(weight: Tensor) -> bool:
    """Whether a weight [n, bytes] is of whole chunks, each row of which begins on 16 bytes."""
    return weight.shape[1] % CHUNK_BYTES == 0 and weight.stride(0) % 16 == 0 and weight.stride(1) == 1


def stream(
    x: Tensor, form: str, stored: Stored, input_scale: Tensor | None, bias: Tensor | None, fusion: Fusion, tile: SkinnyTile | None = None
) -> Tensor:  # fmt: skip
    """y [M, n] of x [M, K], whose rows become codes first, norm and input gate on the way. `form`: int4, bytes (int8) or fp8."""
    x, fusion = without_layer_norm(x, fusion)
    made = encode_rows(x, CODES[form], stored.k, stored.group, fusion.norm_weight, fusion.norm_eps, input_scale, fusion.input_gate)
    gated, m = fusion.gate is not None, x.shape[0]
    n = stored.n // (2 if gated else 1)
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    weight, digits = stored.weight, 2 if CODES[form] == "digits" else 1
    chunks = weight.shape[1] // max(stored.group, CHUNK_BYTES)
    tile = tile or skinny_tile(form, m, n, chunks, gated, num_sms(x.device), device_tuning(x.device))
    n_tiles = token_tiles(m, digits)
    grid = (triton.cdiv(n, 16 * tile.m_tiles // (2 if gated else 1)), tile.splits, triton.cdiv(m * digits, 8 * n_tiles))
    partial = counters = None
    if tile.splits > 1:
        assert grid[0] * grid[2] <= MAX_TILES
        partial = torch.empty(
            (grid[0] * grid[2], tile.splits, 128 * tile.m_tiles * n_tiles // digits), dtype=torch.float32, device=x.device
        )
        counters = arrived(x.device)
    stream_kernel[grid](
        made.codes, made.scale, made.sums, weight, stored.scale, stored.zero, bias, fusion.residual, out, partial, counters,
        m, n, chunks, tile.splits, made.codes.stride(0), weight.stride(0), stored.n,
        FORM=form, ZERO=stored.zero_kind, GROUP=max(stored.group, 1), GATED=gated, ACT=fusion.gate or "silu",
        M_TILES=tile.m_tiles, N_TILES=n_tiles, WARPS=tile.num_warps, STAGES=tile.num_stages, SPLIT=tile.splits > 1,
        PACKED=not x.is_cpu, num_warps=tile.num_warps, **pdl_launch_options(x),
    )  # fmt: skip
    return out
