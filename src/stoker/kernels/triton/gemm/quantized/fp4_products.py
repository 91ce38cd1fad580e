"""The main loop of the quantized GEMM kernels for FP4 experts in the layout `quads` (see `fp4`). See `products` for the tiles.

An iteration multiplies chunks of 64 features of BLOCK_N / 2 pairs of rows. A word has values of both rows of a pair, and of both halves of
a chunk, so that it becomes elements of four matrix operands with the same shape, without moving values between threads:

                                        x tile, features 0 … 31    x tile, features 32 … 63   of each chunk
    sums of the rows 0, 2, 4, … +=      slot 0                  +  slot 2
    sums of the rows 1, 3, 5, … +=      slot 1                  +  slot 3

Per value, two x tiles for both sums take half of the instructions that address them. The scales are one word for the four slots, which
copies to shared memory can load ahead; copies have at least 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.operand_tiles import load_x_tile, x_columns
from stoker.kernels.triton.ptx.unpack import unpack_quads


@triton.jit
def multiply_fp4(
    x, weight, tokens, rows, begin, end, sizes, FORMAT: tl.constexpr, TILE: tl.constexpr, PRODUCT: tl.constexpr
):  # fmt: skip
    """Compute `products.multiply` for FP4 experts in the layout `quads`."""
    BLOCK_N: tl.constexpr = TILE.block_n
    TOKENS: tl.constexpr = TILE.tokens
    CHUNKS: tl.constexpr = _power_of_2_factor(TILE.groups)  # that are loaded together: shapes are powers of two
    UNITS: tl.constexpr = TILE.groups // CHUNKS
    even = tl.zeros([BLOCK_N // 2, TOKENS], tl.float32)  # sums of the even rows
    odd = even
    x_cols_ptr = x_columns(x, tokens, sizes)
    pair = tl.minimum(rows.first // 2 + tl.arange(0, BLOCK_N // 2), sizes.n // 2 - 1)  # [BLOCK_N / 2]
    for start in range(begin, end, TILE.block_k):
        for unit in tl.static_range(UNITS):
            first = start + unit * (CHUNKS * 64)
            even, odd = add_chunks(even, odd, x_cols_ptr, weight, tokens, pair, first, sizes, FORMAT, CHUNKS, PRODUCT)
    acc = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (BLOCK_N, TOKENS))
    return acc, acc


@triton.jit
def add_chunks(
    even, odd, x_cols_ptr, weight, tokens, pair, first, sizes, FORMAT: tl.constexpr, CHUNKS: tl.constexpr, PRODUCT: tl.constexpr
):  # fmt: skip
    """(even, odd) + the products of CHUNKS chunks from input feature `first` on. `pair` [BLOCK_N / 2]: pairs of rows.

    Chunks beyond the last one, of a block_k that does not divide k, repeat it: x is zero there.
    """
    PAIRS: tl.constexpr = even.shape[0]
    STEPS: tl.constexpr = 32 // FORMAT.group
    DTYPE: tl.constexpr = x_cols_ptr.dtype.element_ty
    num_pairs = sizes.n // 2
    # Chunks before pairs, as in memory: a warp reads whole lines of shared memory, and not the same banks for each second pair.
    chunk = (first >> 6) + tl.arange(0, CHUNKS * PAIRS) // PAIRS
    scale_row = (first >> 6) * STEPS + tl.arange(0, CHUNKS * STEPS)
    if not PRODUCT.even_k:
        chunk = tl.minimum(chunk, (sizes.k >> 6) - 1)
        scale_row = tl.minimum(scale_row, (sizes.k >> 6) * STEPS - 1)
    row = chunk * num_pairs + tl.reshape(tl.broadcast_to(pair[None, :], (CHUNKS, PAIRS)), (CHUNKS * PAIRS,))
    words = tl.load(weight.values_ptr + row[:, None] * 32 + tl.arange(0, 32)[None, :])  # int16 [CHUNKS × PAIRS, 32]
    scales = tl.load(weight.scale_ptr + (scale_row * num_pairs)[None, :] + pair[:, None])  # int64 [PAIRS, CHUNKS × STEPS]
    col = tl.arange(0, CHUNKS * 32)
    cols = first + col // 32 * 64 + col % 32
    low_x = load_x_tile(x_cols_ptr, tokens, cols, sizes.num_features, PRODUCT.even_k)  # [CHUNKS × 32, TOKENS]
    high_x = load_x_tile(x_cols_ptr, tokens, cols + 32, sizes.num_features, PRODUCT.even_k)
    words = tl.reshape(words, (CHUNKS, PAIRS, 4, 2, 2, 2))
    scales = tl.permute(tl.reshape(scales, (PAIRS, CHUNKS, 1, STEPS, 1, 1)), (1, 0, 2, 3, 4, 5))
    scales = tl.broadcast_to(scales, (CHUNKS, PAIRS, 1, 2, 1, 1))
    low_even, low_odd, high_even, high_odd = unpack_quads(words, scales, DTYPE, PRODUCT.packed)
    even = tl.dot(_operand(low_even, PRODUCT.packed), low_x, even, input_precision="ieee")
    even = tl.dot(_operand(high_even, PRODUCT.packed), high_x, even, input_precision="ieee")
    odd = tl.dot(_operand(low_odd, PRODUCT.packed), low_x, odd, input_precision="ieee")
    odd = tl.dot(_operand(high_odd, PRODUCT.packed), high_x, odd, input_precision="ieee")
    return _finished(even, PRODUCT.packed), _finished(odd, PRODUCT.packed)


@triton.jit
def _operand(values, PACKED: tl.constexpr):
    """[PAIRS, CHUNKS × 32]: the values of one slot, stored as [CHUNKS, PAIRS, t, step, half, j], with features in their order.

    For sm_100, Triton would change the order in shared memory, and fails to. It does not move an order past inline PTX, which is empty.
    """
    operand = tl.reshape(tl.permute(values, (1, 0, 3, 4, 2, 5)), (values.shape[1], values.shape[0] * 32))
    if PACKED and operand.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("", "=r,0", [operand], dtype=operand.dtype, is_pure=True, pack=2)
    else:
        return operand


@triton.jit
def _finished(sums, PACKED: tl.constexpr):
    """The sums, for which the matrix instructions are waited here, not in the next iteration.

    Sums of which some are still computed at the end of an iteration make ptxas wait for every matrix instruction (C7515): 373 instead of
    343 instructions of 128 rows × 128 features × 64 tokens, and no conversion beside a product.
    """
    if PACKED:
        return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return sums


@triton.constexpr_function
def _power_of_2_factor(number):
    """The largest power of two that divides `number`."""
    return number & -number
