"""The launch of `stream_kernel`: few tokens against a weight that is read once, in the order in which it lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from stoker.kernels.triton import norm
from stoker.kernels.triton.chain import chained
from stoker.kernels.triton.device import num_multiprocessors
from stoker.kernels.triton.quant_codes import encode_rows
from stoker.kernels.triton.quant_linear import MAX_TILES, Stored, arrived, check_residual, ungated, without_layer_norm
from stoker.kernels.triton.stream_kernel import stream_kernel
from stoker.kernels.triton.stream_tuning import MOST_TOKENS, StreamTile, stream_tile, token_tiles
from stoker.kernels.types import Fusion

CODES = {"int4": "digits", "bytes": "digits", "fp8": "fp8"}  # what x becomes
CHUNK_BYTES = 64
XTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
SMALLEST_GROUP = 32  # of int4: a lane's 16 bytes are of one pair of groups, a chunk's of one or two


def takes(x: Tensor, form: str, stored: Stored) -> bool:
    """Whether `stream` is for these rows: few, and against a weight of whole chunks."""
    return 0 < x.shape[0] <= MOST_TOKENS[form] and is_whole(stored) and (form != "int4" or stored.group >= SMALLEST_GROUP)


def is_whole(stored: Stored) -> bool:
    """Whether a weight is of whole chunks, each row of which begins on 16 bytes."""
    weight, size = stored.weight, stored.weight.element_size()
    return weight.shape[1] * size % CHUNK_BYTES == 0 and weight.stride(0) * size % 16 == 0 and weight.stride(1) == 1


@dataclass(frozen=True, slots=True)
class Given:
    """x as the kernel reads it."""

    x: Tensor
    scale: Tensor | None = None
    sums: Tensor | None = None


def stream(
    x: Tensor, form: str, stored: Stored, input_scale: Tensor | None, bias: Tensor | None, fusion: Fusion, tile: StreamTile | None = None
) -> Tensor:  # fmt: skip
    """y [M, n] of x [M, K], whose rows become codes first, norm and input gate on the way. `form`: int4, bytes (int8), fp8 or same."""
    given, fusion = _given(x, form, stored, input_scale, fusion)
    gated, m = fusion.gate is not None, x.shape[0]
    n = stored.n // (2 if gated else 1)
    check_residual(fusion, m, n)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    weight = stored.weight
    size, digits = weight.element_size(), 2 if CODES.get(form) == "digits" else 1
    chunks = weight.shape[1] * size // max(stored.group if form == "int4" else 0, CHUNK_BYTES)
    tile = tile or stream_tile(form, m, n, chunks, gated, num_multiprocessors(x.device))
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
        given.x, given.scale, given.sums, weight, stored.scale, stored.zero, bias, fusion.residual, out, partial, counters,
        m, n, chunks, tile.splits, given.x.stride(0), weight.stride(0) * size, stored.n,
        FORM=form, XTYPE=XTYPES.get(x.dtype, "bfloat16"), ZERO=stored.zero_kind, GROUP=max(stored.group, 1), GATED=gated,
        ACT=fusion.gate or "silu", M_TILES=tile.m_tiles, N_TILES=n_tiles, WARPS=tile.num_warps, STAGES=tile.num_stages,
        SPLIT=tile.splits > 1, PACKED=not x.is_cpu, num_warps=tile.num_warps, **chained(x),
    )  # fmt: skip
    return out


def _given(x: Tensor, form: str, stored: Stored, input_scale: Tensor | None, fusion: Fusion) -> tuple[Given, Fusion]:
    """(x as the kernel reads it, what is left of the fusion)."""
    if form == "same":
        x, fusion = ungated(x, fusion)
        if fusion.norm_kind is not None:
            x = norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
            fusion = replace(fusion, norm_kind=None)
        return Given(_aligned(x)), fusion
    x, fusion = without_layer_norm(x, fusion)
    made = encode_rows(x, CODES[form], stored.k, stored.group, fusion.norm_weight, fusion.norm_eps, input_scale, fusion.input_gate)
    return Given(made.codes, made.scale, made.sums), fusion


def _aligned(x: Tensor) -> Tensor:
    """Rows that begin on 16 bytes."""
    unit = 16 // x.element_size()
    return x if x.stride(-1) == 1 and x.stride(0) % unit == 0 and x.storage_offset() % unit == 0 else x.contiguous()
