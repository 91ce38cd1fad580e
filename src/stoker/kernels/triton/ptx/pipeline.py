"""A multi-stage shared-memory pipeline that each warp fills for itself with `cp.async`, ahead of what it multiplies.

A warp owns its stages: it issues the copies of a stage, commits them as one group, and later waits for that group, loads the stage into
registers and issues new copies into the same stage. Warps never wait for each other, and no CTA barrier is involved.

    stage    0         1         2         3         0         1
    issue    block 0   block 1   block 2   block 3   block 4   block 5  …       NUM_STAGES groups are in flight
    use                                              block 0   block 1  …       cp.async.wait_group NUM_STAGES - 1, bar.warp.sync, ld.shared

A stage holds one or more *blocks* of 16 rows × 128 bytes of a weight (and, of int4, their scales and zeros after the blocks). Eight lanes
copy 128 contiguous bytes of a row, so that each request is for whole cache lines. The eight 16-byte chunks of a row are permuted by the
row number, so that neither these copies nor the loads of fragments (2 rows × 64 bytes or 4 rows × 32 bytes per quarter warp) cause bank
conflicts:

    byte of the block = 128 × row + 16 × (chunk ^ (row % 8)) + byte of the chunk

    position    0   1   2   3   4   5   6   7
    row 0      c0  c1  c2  c3  c4  c5  c6  c7
    row 1      c1  c0  c3  c2  c5  c4  c7  c6
    row 2      c2  c3  c0  c1  c6  c7  c4  c5         and so on; row 8 is as row 0

Written in Gluon, because plain Triton gives a kernel no shared memory to manage. Tensors have one element per thread (see `registers`).
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import int32_registers, ptx

BLOCK_ROWS = tl.constexpr(16)
BLOCK_ROW_BYTES = tl.constexpr(128)
BLOCK_BYTES = tl.constexpr(16 * 128)


@triton.constexpr_function
def groups_per_block(group_size):
    """The number of quantization groups in one row of an int4 block: 128 bytes are 256 features. 1 for group_size 0 (no groups).

    Constexpr.
    """
    return 256 // group_size if group_size else 1


@gluon.jit
def issue_block_copies(
    stage,  # int32: where the stage's first block goes
    source,  # int64: this lane's 16 bytes of row lane / 8 of the first block; the blocks are side by side
    four_rows,  # int64: bytes from a row to the fourth row after it
    eight_rows,  # int64: bytes from row 0 of a block to its row 8
    sizes,  # one int32 per block: 16, or 0 for a block that does not exist and becomes zeros
    lane,
    NUM_BLOCKS: gl.constexpr,
    EVICT_FIRST: gl.constexpr,  # whether L2 evicts these lines before others
):
    """Issue the copies of a stage's blocks: four 16-byte copies per lane and block."""
    # An exclusive or instead of a sum: of `uniform + lane`, ptxas 12.8 makes an LDGSTS with a cache hint that is not a legal instruction.
    even = (stage + lane // 8 * 128) ^ (((lane % 8) ^ (lane // 8)) * 16)
    code: gl.constexpr = _copy_blocks(NUM_BLOCKS, EVICT_FIRST)
    constraints: gl.constexpr = "=r,r,r,l,l,l" + ",r" * NUM_BLOCKS
    gl.inline_asm_elementwise(
        code, constraints, (even, even ^ 64, source, four_rows, eight_rows) + sizes, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def issue_copy_4(address, source, size):
    """Issue a copy of 4 bytes per lane (size 4), or of zeros (size 0)."""
    gl.inline_asm_elementwise(_COPY_4, "=r,r,l,r", [address, source, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def issue_copy_16(address, source, size, mask):
    """Issue a copy of 16 bytes (size 16), or of zeros (size 0), in each lane whose `mask` is true."""
    gl.inline_asm_elementwise(_COPY_16, "=r,r,l,r,r", [address, source, size, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def commit_copies(lane):
    """Group the copies that were issued since the last call, for the waits in `load_block` and `load_row_pairs`."""
    gl.inline_asm_elementwise(_COMMIT_COPIES, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_block(stage, lane, PENDING: gl.constexpr):
    """Wait until at most PENDING copy groups are in flight, then load a block: 16 registers per lane, the A fragments of wgmma.

    Lane l gets 32 contiguous bytes of two rows, from byte 32 × (l % 4) on. Registers 0–3 and 8–11 are the first and second 16 bytes of row
    l / 4; registers 4–7 and 12–15 those of row l / 4 + 8. After the call, new copies may be issued into the stage.
    """
    even = stage + lane // 4 * 128 + ((lane % 4 * 2) ^ (lane // 4)) * 16
    types: gl.constexpr = int32_registers(16)
    code: gl.constexpr = _load_block(PENDING)
    constraints: gl.constexpr = "=&r," * 16 + "r,r"
    return gl.inline_asm_elementwise(code, constraints, [even, even ^ 16], dtype=types, is_pure=False, pack=1)


@gluon.jit
def row_pair_of(lane):
    """The first of the two neighbouring rows of a block (0 … 14) that `load_row_pairs` loads for a lane.

    Lanes 4i … 4i + 3 have rows 0, 4, 2, 6, 8, 12, 10, 14 for i = 0 … 7: in this order no quarter of a warp reads two rows from the same
    banks.
    """
    four = lane // 4
    return four % 2 * 4 + four // 2 % 2 * 2 + four // 4 * 8


@gluon.jit
def load_row_pairs(stage, lane, PIECE_BYTES: gl.constexpr, NUM_BLOCKS: gl.constexpr, PENDING: gl.constexpr):
    """Wait until at most PENDING copy groups are in flight, then load all blocks of a stage: 16 registers per lane and block.

    Lane l gets 32 bytes of rows `row_pair_of(l)` and `row_pair_of(l)` + 1, in pieces of PIECE_BYTES (8 or 16): piece i begins at byte
    PIECE_BYTES × (4i + l % 4) of the row. Order of the registers: piece 0 of the first row, of the second row, piece 1 of the first row, …
    """
    row = row_pair_of(lane)
    first = stage + row * 128 + ((lane % 4 * PIECE_BYTES // 16) ^ (row % 8)) * 16 + lane % 4 * PIECE_BYTES % 16
    types: gl.constexpr = int32_registers(16 * NUM_BLOCKS)
    code: gl.constexpr = _load_row_pairs(PIECE_BYTES, NUM_BLOCKS, PENDING)
    constraints: gl.constexpr = "=&r," * (16 * NUM_BLOCKS) + "r"
    return gl.inline_asm_elementwise(code, constraints, [first], dtype=types, is_pure=False, pack=1)


_COPY_4 = ptx(
    "cp.async.ca.shared.global [$1], [$2], 4, $3;",  # $3 bytes are read, the rest of the 4 are zeros
    "mov.b32 $0, $1;",
)

_COPY_16 = ptx(
    "{ .reg .pred p;",
    "setp.ne.b32 p, $4, 0;",  # p: the mask
    "@p cp.async.cg.shared.global [$1], [$2], 16, $3;",  # cg: through L2 only
    "mov.b32 $0, $1; }",
)

_COMMIT_COPIES = ptx(
    "cp.async.commit_group;",
    "mov.b32 $0, $1;",
)


@triton.constexpr_function
def _copy_blocks(num_blocks, evict_first):
    """PTX of `issue_block_copies`.

    $1, $2: where this lane's chunk of rows 0–3 and of rows 4–7 goes (the chunk permutation differs by 4, an exclusive or with 64 bytes);
    $3: the source; $4, $5: four_rows and eight_rows; then the sizes.
    """
    hint, policy = (".L2::cache_hint", ", q") if evict_first else ("", "")
    lines = [
        "{ .reg .b64 a, b, c, q;",
        "add.s64 a, $3, $4;",  # rows 4–7
        "add.s64 b, $3, $5;",  # rows 8–11
        "add.s64 c, b, $4;",  # rows 12–15
    ]
    if evict_first:
        lines.append("createpolicy.fractional.L2::evict_first.b64 q, 1.0;")
    for block in range(num_blocks):
        for four, source in enumerate(("$3", "a", "b", "c")):
            target = f"[${1 + four % 2} + {BLOCK_BYTES.value * block + 512 * four}]"
            # 16 bytes through L2 (cg), of which $6 + block are read; L2::128B: whole lines, which eight lanes share
            lines.append(f"cp.async.cg.shared.global{hint}.L2::128B {target}, [{source} + {128 * block}], 16, ${6 + block}{policy};")
    return "\n".join([*lines, "mov.b32 $0, $1; }"])


@triton.constexpr_function
def _load_block(pending):
    """PTX of `load_block`: results $0 … $15, then the addresses of the two 16-byte chunks of row lane / 4."""
    lines = [
        f"cp.async.wait_group {pending};",  # this lane's copies have arrived,
        "bar.warp.sync 0xffffffff;",  # and those of the other lanes
    ]
    for chunk in range(2):
        for lower in range(2):  # row lane / 4 + 8: 1024 bytes on, with the same permutation of chunks
            results = ", ".join(f"${8 * chunk + 4 * lower + i}" for i in range(4))
            lines.append(f"ld.shared.v4.b32 {{{results}}}, [${16 + chunk} + {1024 * lower}];")
    lines.append("bar.warp.sync 0xffffffff;")  # all lanes have loaded: copies into this stage may be issued
    return "\n".join(lines)


@triton.constexpr_function
def _load_row_pairs(piece_bytes, num_blocks, pending):
    """PTX of `load_row_pairs`: 16 results per block, then the address of the lane's first piece."""
    words, count = piece_bytes // 4, 16 * num_blocks
    lines = [
        "{ .reg .b32 a;",
        f"cp.async.wait_group {pending};",  # this lane's copies have arrived,
        "bar.warp.sync 0xffffffff;",  # and those of the other lanes
    ]
    for piece in range(32 // piece_bytes):
        for second in range(2):
            # The next piece is 4 × piece_bytes on, and the second row's chunks are permuted by one more: both are exclusive ors.
            lines.append(f"xor.b32 a, ${count}, {4 * piece_bytes * piece + 16 * second};")
            for block in range(num_blocks):
                results = ", ".join(f"${16 * block + 2 * words * piece + words * second + word}" for word in range(words))
                lines.append(f"ld.shared.v{words}.b32 {{{results}}}, [a + {BLOCK_BYTES.value * block + 128 * second}];")
    lines.append("bar.warp.sync 0xffffffff; }")  # all lanes have loaded: copies into this stage may be issued
    return "\n".join(lines)
