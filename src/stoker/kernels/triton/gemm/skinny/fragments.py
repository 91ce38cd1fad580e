"""Loads of a quantized weight and its scales into register fragments, for both skinny GEMM kernels.

A lane l of a warp (g = l / 4, c = l % 4) loads 16 contiguous bytes of two rows of each 16-row tile. The 64 bytes that four lanes load of a
row are a chunk, or a 64-byte part of a longer one:

    16-row tile       bytes 0–15   16–31    32–47    48–63                  registers, in tuple order
      row 0           lane 0       lane 1   lane 2   lane 3                 tile 0, row g      u0 u1 u2 u3
      row 1           lane 4       lane 5   lane 6   lane 7                 tile 0, row g + 8  v0 v1 v2 v3
      ...                                                                   tile 1, row g      ...
      row 8           lane 0       lane 1   lane 2   lane 3
      ...             u of row g, v of row g + 8: A fragments as they are (`ptx.mma`)

A tensor here has one element per thread, so it is one register of each thread.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.group_scales import group_tensors
from stoker.kernels.triton.ptx.mma import load_weight_fragment


@triton.jit
def lane_rows(tile, lane, n, ROW_TILES: tl.constexpr, GATED: tl.constexpr):
    """The indices of the weight rows of which a lane loads bytes, a tuple of 2 × ROW_TILES. In a gated weight, gates come first.

    Indices past the last row are clamped to it; their sums are not stored.
    """
    OUT_TILES: tl.constexpr = ROW_TILES // 2 if GATED else ROW_TILES
    rows = ()
    for i in tl.static_range(2 * ROW_TILES):
        row = tl.minimum(tile * (16 * OUT_TILES) + 8 * (i % (2 * OUT_TILES)) + lane // 4, n - 1)
        rows = rows + (row + n * (i // (2 * OUT_TILES)),)
    return rows


@triton.jit
def row_addresses(weight, rows, lane, COUNT: tl.constexpr):
    """The addresses (int64) of the first byte that a lane loads in each of its COUNT rows. `weight`: QuantizedWeight."""
    addresses = ()
    for i in tl.static_range(COUNT):
        addresses = addresses + (weight.values_ptr.to(tl.int64) + rows[i].to(tl.int64) * weight.stride_row + lane % 4 * 16,)
    return addresses


@triton.jit
def load_weights(addresses, chunk, is_valid, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """The fragments of chunk number `chunk` of COUNT rows: four registers per row and 64-byte part. Zeros where `is_valid` is False."""
    words = ()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(COUNT):
            words = words + load_weight_fragment(addresses[i] + chunk.to(tl.int64) * (64 * PARTS), is_valid.to(tl.int32), part * 64)
    return words


@triton.jit
def load_scales(weight, rows, group, is_valid, ZERO: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """The int4 scales of COUNT rows in GROUPS groups, of which `group` is the first. Each scale is followed by its zero or offset, if any.

    The loads are volatile, so that the assembler leaves them in front of `griddepcontrol.wait`.
    """
    scales_zeros = ()
    for i in tl.static_range(GROUPS):
        offset = (group + i).to(tl.int64) * weight.stride_group
        for row in tl.static_range(COUNT):
            scales_zeros = scales_zeros + (tl.load(weight.scale_ptr + offset + rows[row], mask=is_valid, other=0, volatile=True),)
            if group_tensors(ZERO) == 2:
                scales_zeros = scales_zeros + (tl.load(weight.zero_ptr + offset + rows[row], mask=is_valid, other=0, volatile=True),)
    return scales_zeros
