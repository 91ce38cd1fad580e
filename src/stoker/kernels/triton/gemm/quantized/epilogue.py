"""What follows the main loop of the quantized GEMM kernels: scales, bias, gate and residual, and the combination of split-K slices.

    y = gate(gate, up) + residual        gate, up = (sums × x scale × weight scale + bias) of a gated weight; see `activation.gated_value`
    y = sums × x scale × weight scale + bias + residual                                          without a gate

Split-K: every CTA of a tile stores its sums in `partial`, then increments the tile's counter. The CTA that finds the counter at
SPLITS - 1 is the last one. It sets the counter to zero for the next launch, adds all sums up in the order of the slices (so that
the result does not depend on which CTA was last), and continues with the formula above.

    partial float32 [tile, split, gate | up, BLOCK_N, TOKENS]         (without a gate [tile, split, BLOCK_N, TOKENS])
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import gated_value


@triton.jit
def store_or_combine(
    acc,  # float32 [BLOCK_N, TOKENS]: this slice's sums
    acc_up,  # likewise of the up rows; without a gate not read
    tile_idx,
    split,
    split_k,  # SplitKPointers
    row_scale_ptr,  # float32 [n] of the weight (HAS_ROW_SCALE)
    x_scale,  # float32 [TOKENS] or None
    output,  # OutputPointers
    tokens,  # TokenTile
    rows,  # WeightRows
    sizes,  # GemmSizes
    TILE: tl.constexpr,  # GemmTile
    HAS_ROW_SCALE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # `types.Gate`
):
    """Store the result of a tile. With split-K, store this slice's sums instead, and the last CTA of the tile combines them.

    `acc` and `acc_up` float32 [BLOCK_N, TOKENS]; `x_scale` [TOKENS] or None; `tokens`: TokenTile; `rows`: WeightRows; `sizes`: GemmSizes.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    TOKENS: tl.constexpr = TILE.tokens
    SPLITS: tl.constexpr = TILE.splits
    if SPLITS == 1:
        store_outputs(acc, acc_up, row_scale_ptr, x_scale, output, tokens, rows, sizes, HAS_ROW_SCALE, GATED, ACTIVATION)
    else:
        SLICE_SIZE: tl.constexpr = (2 if GATED else 1) * BLOCK_N * TOKENS
        element = tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        slice_ptr = split_k.partial_ptr + (tile_idx * SPLITS + split).to(tl.int64) * SLICE_SIZE
        tl.store(slice_ptr + element, acc)
        if GATED:
            tl.store(slice_ptr + BLOCK_N * TOKENS + element, acc_up)
        tl.debug_barrier()  # the stores of all threads come before the release of the one thread that counts
        if tl.atomic_add(split_k.finished_ptr + tile_idx, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(split_k.finished_ptr + tile_idx, 0)
            total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
            total_up = total
            for other in range(SPLITS):
                other_ptr = split_k.partial_ptr + (tile_idx * SPLITS + other).to(tl.int64) * SLICE_SIZE
                total += tl.load(other_ptr + element)
                if GATED:
                    total_up += tl.load(other_ptr + BLOCK_N * TOKENS + element)
            store_outputs(total, total_up, row_scale_ptr, x_scale, output, tokens, rows, sizes, HAS_ROW_SCALE, GATED, ACTIVATION)


@triton.jit
def store_outputs(
    y,  # float32 [BLOCK_N, TOKENS]: sums over all features
    up,  # likewise of the up rows
    row_scale_ptr,
    x_scale,
    output,
    tokens,
    rows,
    sizes,
    HAS_ROW_SCALE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Apply scales, bias, gate and residual to the sums y (and `up`) [BLOCK_N, TOKENS], and store them transposed: out is [tokens, n]."""
    if x_scale is not None:
        y = y * x_scale[None, :]
    if GATED and x_scale is not None:
        up = up * x_scale[None, :]
    if HAS_ROW_SCALE:
        y = y * tl.load(row_scale_ptr + rows.row, mask=rows.inside, other=0.0)[:, None]
        if GATED:
            up = up * tl.load(row_scale_ptr + sizes.n + rows.row, mask=rows.inside, other=0.0)[:, None]
    if output.bias_ptr is not None:
        y += tl.load(output.bias_ptr + rows.row, mask=rows.inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(output.bias_ptr + sizes.n + rows.row, mask=rows.inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y = gated_value(y, up, ACTIVATION)
    offset = tokens.out_row.to(tl.int64)[None, :] * sizes.stride_out + rows.row[:, None]
    inside = rows.inside[:, None] & tokens.inside[None, :]
    if output.residual_ptr is not None:
        y += tl.load(output.residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(output.out_ptr + offset, y.to(output.out_ptr.dtype.element_ty), mask=inside)
