"""Split-K of the GEMM for many rows: two work units per tile, each with half of the features, whose sums the last CTA of the tile adds.

Unit u computes slice u mod 2 of tile u ÷ 2, rounded down. The consumers of a CTA work on different rows, so each stores, counts and adds
the sums of its own:

    partial    float32 [tile, consumer, slice, ROWS, N]
    finished   int32 [tile, consumer]                       the stored slices; zero between launches

    store the slice | barrier | add 1 to `finished`, release and acquire | if it was 1: set it to 0, add the other slice

The sum of two numbers does not depend on their order, so the same inputs have the same result. No CTA waits for another one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.sync import cta_barrier


@gluon.jit
def unit_slice(unit, k, BLOCK_K: gl.constexpr, SLICES: gl.constexpr):
    """(tile, slice, first feature, end of the features) of a work unit. The first of two slices may have one more block than the second."""
    if SLICES == 1:
        return unit, 0, 0, k
    else:
        middle = gl.cdiv(gl.cdiv(k, BLOCK_K), 2) * BLOCK_K
        part = unit % 2
        return unit // 2, part, part * middle, gl.where(part == 0, middle, k)


@gluon.jit
def finish_slice(acc, split_k, tile, part, INDEX: gl.constexpr):
    """Store the sums of slice `part`, and count it. Returns whether the other slice of the consumer's rows of the tile is complete."""
    partial_ptr, finished_ptr = split_k
    gl.store(slice_pointers(partial_ptr, tile, part, acc, INDEX), acc)
    cta_barrier()  # the stores of all threads come before the release of the one thread that counts
    return gl.atomic_add(finished_ptr + 2 * tile + INDEX, 1, sem="acq_rel", scope="gpu") == 1


@gluon.jit
def combine_slices(acc, split_k, tile, part, INDEX: gl.constexpr):
    """The sums of both slices, and the counter set to zero for the next launch. `acc`: the sums of slice `part`."""
    partial_ptr, finished_ptr = split_k
    gl.store(finished_ptr + 2 * tile + INDEX, 0)
    return acc + gl.load(slice_pointers(partial_ptr, tile, 1 - part, acc, INDEX))


@gluon.jit
def slice_pointers(partial_ptr, tile, part, acc, INDEX: gl.constexpr):
    """Pointers to the elements of slice `part` of a consumer's rows of a tile, in the layout of `acc` [ROWS, N]."""
    ROWS: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = acc.type.layout
    slice_ptr = partial_ptr + ((2 * tile + INDEX) * 2 + part).to(gl.int64) * (ROWS * N)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    return slice_ptr + rows[:, None] * N + columns[None, :]
