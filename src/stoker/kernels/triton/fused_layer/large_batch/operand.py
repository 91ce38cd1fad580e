"""The activations of a CTA's slice as wgmma's B operand in shared memory (layout: `ptx.wgmma`).

The first linear's activations come from attention, as rows, and every CTA rearranges its slice (`store_operand`). The later ones were
written to global memory by the `epilogue` of the linear before, already in the operand's order, and are copied in bulk, one copy and one
mbarrier per block (`issue_operand_copies`), so that products of the first block begin while the other blocks are still on their way.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.config import NUM_WARPS
from stoker.kernels.triton.fused_layer.large_batch.schedule import blocks_of_slice, slice_of_cta
from stoker.kernels.triton.ptx.bulk_copy import fence_global_for_bulk_copies, issue_bulk_copy
from stoker.kernels.triton.ptx.wgmma import first_features, load_token_pieces, operand_bytes, store_core_matrix_rows


@gluon.jit
def store_operand(linear, operand, num_ctas, m, lane, warp, SPLIT_K: gl.constexpr, TOKENS: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """Store this CTA's slice of x [m, k] in shared memory as the operand. Tokens beyond m and features beyond k are zeros.

    A warp processes one unit at a time: one side (low or high nibbles) of one block for 8 tokens. Lane l has token l % 8 of these, and the
    features of instructions 2 × (l / 8) and 2 × (l / 8) + 1.
    """
    COLUMNS: gl.constexpr = TOKENS // 8
    firsts: gl.constexpr = first_features(GROUP_SIZE)
    slice_idx, _, _ = slice_of_cta(SPLIT_K, num_ctas)
    block, blocks = blocks_of_slice(linear.row_blocks, slice_idx, SPLIT_K)
    for unit in range(warp, 2 * blocks * COLUMNS, NUM_WARPS):
        side = unit // COLUMNS  # counted over blocks
        token = unit % COLUMNS * 8 + lane % 8
        feature = (block + side // 2) * 256 + side % 2 * GROUP_SIZE + lane // 8 * 8
        are_valid = ()
        for piece in gl.static_range(4):
            are_valid = are_valid + (((token < m) & (feature + firsts[piece] < linear.k)).to(gl.int32),)
        pieces = load_token_pieces(linear.x_ptr.to(gl.int64) + 2 * (token.to(gl.int64) * linear.k + feature), are_valid, GROUP_SIZE)
        address = operand + side * (operand_bytes(TOKENS) // 2) + unit % COLUMNS * 256
        store_core_matrix_rows(address + lane // 8 * (64 * TOKENS) + lane % 8 * 16, pieces, TOKENS)


@gluon.jit
def issue_operand_copies(linear, operand, mbarriers, num_ctas, thread, SPLIT_K: gl.constexpr, TOKENS: gl.constexpr):
    """Issue the bulk copies of this CTA's slice of the operand, one per block with its own mbarrier.

    Only for a CTA that multiplies it: in the last linear a CTA without tiles would end with copies under way into its shared memory.
    """
    slice_idx, _, _ = slice_of_cta(SPLIT_K, num_ctas)
    block, blocks = blocks_of_slice(linear.row_blocks, slice_idx, SPLIT_K)
    SIZE: gl.constexpr = operand_bytes(TOKENS)
    source = linear.x_ptr.to(gl.int64) + block.to(gl.int64) * SIZE
    fence_global_for_bulk_copies()
    for i in range(blocks):
        issue_bulk_copy(operand + i * SIZE, source + i * SIZE, mbarriers + 8 * i, thread, SIZE)
