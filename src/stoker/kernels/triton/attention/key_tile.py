"""Key and value tiles from the paged cache: block ids, addresses, and loads of one part of the features (see `arguments.HeadShape`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_ids(block_table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BEFORE_WAIT: tl.constexpr = False):
    """The KV cache blocks of tokens start : start + BLOCK_N of a row: one id if all are in one block, else one id per token.

    Entries for tokens from `end` on are not read. BEFORE_WAIT: use a volatile load, which the compiler does not move behind the following
    `pdl_wait`.
    """
    if BLOCK_N <= BLOCK_SIZE:
        return tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < end, other=0, volatile=BEFORE_WAIT)
    else:
        key = start + tl.arange(0, BLOCK_N)
        return tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key < end, other=0, volatile=BEFORE_WAIT)


@triton.jit
def page_rows(pages_ptr, block, start, stride_block, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_N] to the features of tokens start : start + BLOCK_N of one head. `block` is a result of `block_ids`.

    `pages_ptr` points to the head's page in block 0. `start` is a multiple of min(BLOCK_N, BLOCK_SIZE).
    """
    place = (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    if BLOCK_N <= BLOCK_SIZE:
        place = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    return pages_ptr + block.to(tl.int64) * stride_block + place * SIZE


@triton.jit
def prefetch_rows(rows, SIZE: tl.constexpr):
    """Begin to copy SIZE bytes, a multiple of 32, at each of the pointers `rows` [N] to the L2 cache, by sectors of 32 bytes."""
    sectors = rows.to(tl.int64)[:, None] + 32 * tl.arange(0, SIZE // 32)[None, :]
    # An element-wise instruction must have a result; nothing uses it.
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [sectors], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_part(rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, inside, STEP: tl.constexpr = 1):
    """[N, WIDTH]: features FIRST, FIRST + STEP, … of each row; features from SIZE on are zero.

    `rows` [N] are pointers. `inside` [N] is True for rows that exist; None means all.
    """
    cols = FIRST + STEP * tl.arange(0, WIDTH)[None, :]
    addresses = rows[:, None] + cols
    if inside is None:
        if FIRST + STEP * (WIDTH - 1) < SIZE:
            return tl.load(addresses)
        else:
            return tl.load(addresses, mask=cols < SIZE, other=0.0)
    else:
        if FIRST + STEP * (WIDTH - 1) < SIZE:
            return tl.load(addresses, mask=inside[:, None], other=0.0)
        else:
            return tl.load(addresses, mask=inside[:, None] & (cols < SIZE), other=0.0)


@triton.jit
def store_part(rows, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, inside):
    """Store x [N, WIDTH] as features FIRST : FIRST + WIDTH (at most SIZE) of the rows whose pointers are `rows` [N]."""
    cols = FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(rows[:, None] + cols, x.to(rows.dtype.element_ty), mask=inside[:, None] & (cols < SIZE))


@triton.jit
def as_value_operand(x, DTYPE: tl.constexpr):
    """x [N, D] in DTYPE, as the right operand of weights [M, N] × x.

    This operand is read from shared memory transposed, which matrix loads (ldmatrix.trans) do for 16-bit elements only. Triton would move
    the conversion of 8-bit elements behind that read and load them one by one: 64 loads per thread for a tile of 64 × 128. `tl.join`
    prevents this, because Triton moves no conversion across it.
    """
    if x.dtype.primitive_bitwidth == 8 and tl.float32 != DTYPE:
        even, odd = tl.split(tl.reshape(x.to(DTYPE), (x.shape[0], x.shape[1] // 2, 2)))
        return tl.reshape(tl.join(even, odd), (x.shape[0], x.shape[1]))
    else:
        return x.to(DTYPE)
