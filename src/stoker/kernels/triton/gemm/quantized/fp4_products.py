"""The main loop of the quantized GEMM kernels for FP4 experts in the layout `quads` (see `fp4`). See `products` for the tiles.

An iteration multiplies chunks of 64 features of PAIRS pairs of rows. A word has values of both rows of a pair, and of both halves of a
chunk, so that it becomes elements of four matrix operands with the same shape, without moving values between threads:

                                     x tile, features 0 … 31    x tile, features 32 … 63   of each chunk
    sums of the rows r          +=   slot 0                  +  slot 2
    sums of the rows r + n / 2  +=   slot 1                  +  slot 3

With a gate, these are the gates and the ups of the same features: a thread applies the gate to its own sums. Per value, two x tiles for
both sums take half of the instructions that address them. The scales are one word for the four slots, which copies to shared memory can
load ahead; copies have at least 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import current_target

from stoker.kernels.triton.gemm.quantized.arguments import WeightRows
from stoker.kernels.triton.gemm.quantized.operand_tiles import load_x_tile, x_columns
from stoker.kernels.triton.ptx.unpack import unpack_quads


@triton.jit
def paired_rows(n_tile, n, TILE: tl.constexpr):
    """The rows of tile number `n_tile` of a weight [n, k] without a gate, as `WeightRows`: BLOCK_N / 2 rows, and those n / 2 after them."""
    PAIRS: tl.constexpr = TILE.block_n // 2
    index = tl.arange(0, TILE.block_n)
    pair = n_tile * PAIRS + index % PAIRS
    inside = pair < n // 2
    row = pair + index // PAIRS * (n // 2)
    return WeightRows(row, inside, tl.where(inside, row, 0).to(tl.int64), n_tile * PAIRS)


@triton.jit
def multiply_fp4(
    x,
    weight,
    tokens,
    rows,
    begin,
    end,
    sizes,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute `products.multiply` for FP4 experts in the layout `quads`. Without a gate, `rows` are those of `paired_rows`."""
    PAIRS: tl.constexpr = TILE.block_n if GATED else TILE.block_n // 2
    TOKENS: tl.constexpr = TILE.tokens
    CHUNKS: tl.constexpr = _power_of_2_factor(TILE.groups)  # that are loaded together: shapes are powers of two
    UNITS: tl.constexpr = TILE.groups // CHUNKS
    num_pairs = sizes.n if GATED else sizes.n // 2
    left = tl.zeros([PAIRS, TOKENS], tl.float32)  # sums of the rows r
    right = left  # of the rows r + n / 2
    x_cols_ptr = x_columns(x, tokens, sizes)
    pair = tl.minimum(rows.first + tl.arange(0, PAIRS), num_pairs - 1)  # [PAIRS]
    for start in range(begin, end, TILE.block_k):
        for unit in tl.static_range(UNITS):
            first = start + unit * (CHUNKS * 64)
            left, right = add_chunks(left, right, x_cols_ptr, weight, tokens, pair, num_pairs, first, sizes, FORMAT, CHUNKS, PRODUCT)
    if GATED:
        return left, right
    else:
        acc = tl.reshape(tl.permute(tl.join(left, right), (2, 0, 1)), (2 * PAIRS, TOKENS))
        return acc, acc


@triton.jit
def add_chunks(
    left,
    right,
    x_cols_ptr,
    weight,
    tokens,
    pair,
    num_pairs,
    first,
    sizes,
    FORMAT: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """(left, right) + the products of CHUNKS chunks from input feature `first` on. `pair` [PAIRS]: pairs of rows.

    Chunks beyond the last one, of a block_k that does not divide k, repeat it: x is zero there.
    """
    PAIRS: tl.constexpr = pair.shape[0]
    STEPS: tl.constexpr = 32 // FORMAT.group
    DTYPE: tl.constexpr = x_cols_ptr.dtype.element_ty
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
    low_left, low_right, high_left, high_right = unpack_quads(words, scales, DTYPE, PRODUCT.packed)
    left = tl.dot(_operand(low_left, PRODUCT.packed), low_x, left, input_precision="ieee")
    left = tl.dot(_operand(high_left, PRODUCT.packed), high_x, left, input_precision="ieee")
    right = tl.dot(_operand(low_right, PRODUCT.packed), low_x, right, input_precision="ieee")
    right = tl.dot(_operand(high_right, PRODUCT.packed), high_x, right, input_precision="ieee")
    _wait_for_products(PRODUCT.packed)
    return left, right


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
def _wait_for_products(PACKED: tl.constexpr):
    """On sm_90: wait for the last product of an iteration here, not in the next one. Triton waits for the others.

    An iteration that begins while a matrix instruction reads its operand writes the registers of this operand, so that ptxas would wait
    for every matrix instruction (C7515): 361 instead of 332 instructions of 128 rows × 128 features × 32 tokens, and no conversion beside
    a product.
    """
    if PACKED and _has_wgmma():
        tl.inline_asm_elementwise("wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _has_wgmma():
    """Whether the compilation target has the asynchronous matrix instructions of sm_90."""
    target = current_target()
    return target is not None and int(target.arch) == 90


@triton.constexpr_function
def _power_of_2_factor(number):
    """The largest power of two that divides `number`."""
    return number & -number
