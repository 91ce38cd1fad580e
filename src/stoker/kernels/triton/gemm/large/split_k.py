"""Split-K of the GEMM for many rows: the tiles of the last round are divided along the features, so that no SM is idle in it.

Tiles before tile number `whole` are work units. Each later one is divided into `slices` units, of which the last one to finish adds the
sums of all:

    units    | tile 0 | tile 1 | … | tile whole: slice 0 | slice 1 | … | tile whole + 1: slice 0 | slice 1 | …

The consumers of a CTA work on different rows, so each stores, counts and adds the sums of its own:

    partial    float32 [tile - whole, consumer, slice, ROWS × N]
    finished   int32 [tile - whole, consumer]                       the stored slices; zero between launches

    store the slice | barrier | add 1 to `finished`, release and acquire | if it was slices - 1: set it to 0, add all slices

The sums of a slice are in an order in which a thread stores and loads 16 bytes at a time, and a warp 512 bytes in a row, because in the
layout of wgmma, a warp has 32 bytes of each of 8 rows:

    | columns 0 to 7: thread 0: columns 0, 1 of rows 0 and 8 | thread 1: columns 2, 3 of rows 0 and 8 | … thread 127 | columns 8 to 15 …

Slices are added in their order, so the same inputs have the same result. No CTA waits for another one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.sync import cta_barrier


@gluon.jit
def count_slices(tiles, split):
    """The number of work units of `tiles` tiles."""
    whole, slices = split
    return whole + (tiles - whole) * slices


@gluon.jit
def unit_slice(unit, k, split, BLOCK_K: gl.constexpr, MAX_SLICES: gl.constexpr):
    """(tile, slice, first feature, end of the features) of a work unit. The number of blocks of two slices differs by at most one."""
    if MAX_SLICES == 1:
        return unit, 0, 0, k
    else:
        whole, slices = split
        blocks = gl.cdiv(k, BLOCK_K)
        tile = whole + (unit - whole) // slices
        part = (unit - whole) % slices
        is_whole = unit < whole
        first = gl.where(is_whole, 0, part * blocks // slices * BLOCK_K)
        end = gl.where(is_whole | (part == slices - 1), k, (part + 1) * blocks // slices * BLOCK_K)
        return gl.where(is_whole, unit, tile), part, first, end


@gluon.jit
def finish_slice(acc, scratch, slice_of, split, INDEX: gl.constexpr, CONSUMERS: gl.constexpr):
    """Store the sums of a slice, and count it. Returns whether all slices of the consumer's rows of the tile are complete."""
    _, finished_ptr = scratch
    tile, part = slice_of
    whole, slices = split
    sums = by_thread(acc)
    gl.store(slice_pointers(sums, scratch, tile - whole, part, slices, INDEX, CONSUMERS), sums)
    cta_barrier()  # the stores of all threads come before the release of the one thread that counts
    return gl.atomic_add(finished_ptr + CONSUMERS * (tile - whole) + INDEX, 1, sem="acq_rel", scope="gpu") == slices - 1


@gluon.jit
def combine_slices(acc, scratch, slice_of, split, INDEX: gl.constexpr, CONSUMERS: gl.constexpr):
    """The sums of all slices, and the counter set to zero for the next launch. `acc` has the shape and the layout of the sums."""
    _, finished_ptr = scratch
    tile, _ = slice_of
    whole, slices = split
    gl.store(finished_ptr + CONSUMERS * (tile - whole) + INDEX, 0)
    total = by_thread(acc)
    total = gl.load(slice_pointers(total, scratch, tile - whole, 0, slices, INDEX, CONSUMERS))
    for part in range(1, slices):
        total += gl.load(slice_pointers(total, scratch, tile - whole, part, slices, INDEX, CONSUMERS))
    return by_column(total, acc)


@gluon.jit
def slice_pointers(sums, scratch, index, part, slices, INDEX: gl.constexpr, CONSUMERS: gl.constexpr):
    """Pointers to the `sums` (`by_thread`) of slice `part` of a consumer's rows of the divided tile number `index`."""
    partial_ptr, _ = scratch
    SIZE: gl.constexpr = sums.shape[0]
    slice_ptr = partial_ptr + ((CONSUMERS * index + INDEX) * slices + part).to(gl.int64) * SIZE
    return slice_ptr + gl.arange(0, SIZE, sums.type.layout)


@gluon.jit
def by_thread(acc):
    """The sums [ROWS, N] of a consumer in one dimension, in the order of the diagram above. No value moves."""
    N: gl.constexpr = acc.shape[1]
    parts = acc.reshape([acc.shape[0] // 16, 2, 8, N // 8, 4, 2])  # warp, half of its rows, row, column block, pair of columns, column
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([acc.shape[0] * N])


@gluon.jit
def by_column(sums, acc):
    """The inverse of `by_thread`, in the shape and layout of `acc`."""
    N: gl.constexpr = acc.shape[1]
    parts = sums.reshape([N // 8, acc.shape[0] // 16, 8, 4, 2, 2])
    return gl.convert_layout(parts.permute((1, 4, 2, 0, 3, 5)).reshape([acc.shape[0], N]), acc.type.layout)
