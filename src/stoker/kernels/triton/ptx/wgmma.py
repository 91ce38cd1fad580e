"""Tokens in shared memory as the right operand of Hopper's matrix instructions (wgmma), and int4 from registers as the left one.

An instruction multiplies 64 rows × 16 features, of four warps, by 16 features × all tokens. It finds the tokens in bricks of 8 tokens ×
8 features, 128 bytes without a gap: of a block's 256 features first those of low nibbles, then of high ones; of these first the eight
instructions, then the tokens by eights, then the two bricks of an instruction. Which features these are is a matter of agreement with the
rows (see `fragments`): lane l of a warp has 32 bytes of a row side by side, those from l % 4 × 32 on, as they lie in memory, of one pair of
groups (`quant_int4`). Word t of its eight goes into instruction t: bytes 0 and 2 meet the first brick, 1 and 3 the second.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import float32_registers, int32_registers

# Four bits of a register's half are a bfloat16 as they are, a subnormal one: code × 2^-133, or where they lie four higher × 2^-129. One
# multiplication and addition makes a value of it, times 2^-16 so that no scale is too large for that.
SUM_SCALE = gl.constexpr(2.0**-16)
CODE_SCALES = gl.constexpr((2.0**117, 2.0**113))


@triton.constexpr_function
def block_bytes(tokens):
    """Bytes of a block's 256 features: a pair of groups."""
    return 512 * tokens


@triton.constexpr_function
def column_features(group):
    """The first features of low nibbles that the four lanes of a row have, in groups of 32, 64 or 128."""
    return tuple(column * 32 // group * 2 * group + column * 32 % group for column in range(4))


@gluon.jit
def place_of(feature, token, TOKENS: gl.constexpr, GROUP: gl.constexpr):
    """Where a feature of a token lies, in elements."""
    within = feature & 255
    byte = within // (2 * GROUP) * GROUP + within % GROUP
    half = (feature >> 8) * 2 + (within // GROUP & 1)
    brick = (half * 8 + ((byte & 31) >> 2)) * (TOKENS // 4) + (token >> 3) * 2 + (byte & 1)
    return brick * 64 + (token & 7) * 8 + (byte >> 5) * 2 + ((byte & 3) >> 1)


@gluon.jit
def take_pieces(address, are_there, GROUP: gl.constexpr):
    """16 registers: 16 bytes from `address` (int64) on for each of `column_features`, past the multiprocessor's own cache.

    are_there: four numbers, 0 where a piece is not there and becomes zeros.
    """
    kinds: gl.constexpr = int32_registers(16)
    code: gl.constexpr = _taking_pieces(column_features(GROUP))
    return gl.inline_asm_elementwise(code, "=&r," * 16 + "l,r,r,r,r", (address,) + are_there, dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def put_bricks(place, values, TOKENS: gl.constexpr):
    """Store the pieces of `take_pieces`, 8 × p features further, as a token's part of instructions 2 × p and 2 × p + 1.

    place: of the token's 16 bytes in the first of these four bricks.
    """
    code: gl.constexpr = _putting_bricks(TOKENS)
    gl.inline_asm_elementwise(code, "=r,r" + ",r" * 16, (place,) + values, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def seen_by_products(thread):
    """What this thread has stored in shared memory is seen by matrix instructions once threads have met."""
    gl.inline_asm_elementwise("fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def seen_by_copies():
    """What programs have stored in memory before they met is seen by the copies that the first thread asks for. Takes some 0.5 µs."""
    gl.inline_asm_elementwise(_SEEN, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def expect_blocks(barriers, count, thread):
    """Make `count` barriers, of 8 bytes each, that a copy completes: by the first thread, before threads next meet."""
    gl.inline_asm_elementwise(_EXPECTING, "=r,r,r", [thread * 0 + barriers, thread * 0 + count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_tokens(place, source, barrier, thread, BYTES: gl.constexpr):
    """Copy BYTES from `source` (int64) to shared memory: the first thread asks, `wait_for_tokens` waits."""
    code: gl.constexpr = _asking_tokens(BYTES)
    given = [thread * 0 + place, thread.to(gl.int64) * 0 + source, thread * 0 + barrier]
    gl.inline_asm_elementwise(code, "=r,r,l,r", given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_tokens(barrier, thread):
    """Wait for a barrier's one copy."""
    gl.inline_asm_elementwise(_WAITING, "=r,r", [thread * 0 + barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pair_of(value):
    """A register of the same bfloat16 twice."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [value], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def add_block(sums, words, scales, lows, place, TOKENS: gl.constexpr):
    """sums (TOKENS / 2 registers) + the products of 64 rows × 256 features, by the four warps of a group together.

    words: of `ring.take_block`. scales, lows: of a lane's first row in both groups, then of its second row, as `pair_of` the scale ×
    CODE_SCALES of its group, and of the value of code 0 × SUM_SCALE, which the sums are times. place: of the block's tokens.
    """
    COUNT: gl.constexpr = TOKENS // 2
    kinds: gl.constexpr = float32_registers(COUNT)
    code: gl.constexpr = _adding_block(TOKENS)
    given: gl.constexpr = "=f," * COUNT + "r" + ",r" * 24 + _tied(COUNT)
    return gl.inline_asm_elementwise(code, given, (place,) + words + scales + lows + sums, dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def over_rows(value):
    """The sum over the eight lanes of a warp whose numbers are equal modulo four."""
    return gl.inline_asm_elementwise(_OVER_ROWS, "=&f,f", [value], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def warp_number():
    """As a scalar: what depends on it branches warp by warp."""
    return gl.inline_asm_elementwise(_WARP, "=&r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1)


_WARP = gl.constexpr("mov.u32 $0, %tid.x; shr.u32 $0, $0, 5; add.s32 $0, $0, $1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;")
_SEEN = gl.constexpr("{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.b32 p, t, 0; @p fence.proxy.async.global; mov.b32 $0, $1; }")
_EXPECTING = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t, i, a; mov.u32 t, %tid.x; setp.ne.b32 p, t, 0; @p bra DONE; mov.b32 i, 0; mov.b32 a, $1; "
    "AGAIN: mbarrier.init.shared.b64 [a], 1; add.s32 a, a, 8; add.s32 i, i, 1; setp.lt.s32 p, i, $2; @p bra AGAIN; "
    "fence.proxy.async; DONE: mov.u32 $0, t; }"
)
_OVER_ROWS = gl.constexpr(
    "{ .reg .f32 t; shfl.sync.bfly.b32 t, $1, 4, 31, 0xffffffff; add.f32 $0, $1, t; shfl.sync.bfly.b32 t, $0, 8, 31, 0xffffffff; "
    "add.f32 $0, $0, t; shfl.sync.bfly.b32 t, $0, 16, 31, 0xffffffff; add.f32 $0, $0, t; }"
)
_WAITING = gl.constexpr("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [$1], 0; @!p bra AGAIN; mov.b32 $0, $1; }")


@triton.constexpr_function
def _tied(count):
    return "".join(f",{i}" for i in range(count))


@triton.constexpr_function
def _taking_pieces(features):
    lines = [f"mov.b32 ${i}, 0;" for i in range(16)]
    for piece, feature in enumerate(features):
        words = ", ".join(f"${4 * piece + i}" for i in range(4))
        lines.append(f"setp.ne.b32 p, ${17 + piece}, 0; @p ld.global.cg.v4.b32 {{{words}}}, [$16 + {2 * feature}];")
    return "{ .reg .pred p; " + " ".join(lines) + " }"


@triton.constexpr_function
def _putting_bricks(tokens):
    """A piece is 8 features, words (0 1) (2 3) (4 5) (6 7): the first four are a lane's word of one instruction, the others of the next."""
    lines = []
    for step in range(2):
        for brick, picked in enumerate(("0x5410", "0x7632")):
            for column in range(4):
                low, high = (f"${2 + 4 * column + 2 * step + i}" for i in range(2))
                lines.append(f"prmt.b32 t{column}, {low}, {high}, {picked};")
            lines.append(f"st.shared.v4.b32 [$1 + {32 * tokens * step + 128 * brick}], {{t0, t1, t2, t3}};")
    return "{ .reg .b32 t<4>; " + " ".join(lines) + " mov.b32 $0, $1; }"


@triton.constexpr_function
def _asking_tokens(size):
    return (
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.b32 p, t, 0; "
        f"@p mbarrier.arrive.expect_tx.shared.b64 _, [$3], {size}; "
        f"@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], {size}, [$3]; mov.b32 $0, t; }}"
    )


@triton.constexpr_function
def _adding_block(tokens):
    """Four times 16 registers are widened and four instructions sent, which run while the next 16 are widened.

    $count is the place of the tokens; then come 16 words, 4 scales, 4 lows. The descriptor of tokens holds, in 16 bytes, where the bricks
    begin, the way from an instruction's first brick to its second (128), and to the next eight tokens (256).
    """
    count = tokens // 2
    sums = ", ".join(f"${i}" for i in range(count))
    words, scales, lows = count + 1, count + 17, count + 21
    together = 2 if tokens < 64 else 1
    lines = [
        f"mov.b32 h, {256 >> 4}; setp.ne.b32 p, h, 0; shr.u32 d, ${count}, 4; or.b32 d, d, {(128 >> 4) << 16};",
        "redux.sync.min.u32 d, d, 0xffffffff; mov.b64 v, {d, h};",  # into uniform registers, where descriptors have to be
    ]
    for quarter in range(4):
        side, half = quarter // 2, quarter % 2
        name, mask = "ab"[quarter % together], ("0x000f000f", "0x00f000f0")[side]
        if quarter >= together:
            lines.append(f"wgmma.wait_group.sync.aligned {together - 1};")
        for word in range(4):
            for row in range(2):
                source, terms = f"${words + 8 * half + 4 * row + word}", f"${scales + 2 * row + side}, ${lows + 2 * row + side}"
                lines.append(f"and.b32 t, {source}, {mask}; fma.rn.bf16x2 {name}{4 * word + row}, t, {terms};")
                lines.append(f"shr.b32 t, {source}, 8; and.b32 t, t, {mask}; fma.rn.bf16x2 {name}{4 * word + 2 + row}, t, {terms};")
        lines.append("wgmma.fence.sync.aligned;")
        for step in range(4):
            rows = ", ".join(f"{name}{4 * step + i}" for i in range(4))
            away = (side * 8 + half * 4 + step) * 32 * tokens >> 4
            lines.append(f"add.s64 w, v, {away};")
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{sums}}}, {{{rows}}}, w, p, 1, 1, 0;")
        lines.append("wgmma.commit_group.sync.aligned;")
    lines.append("wgmma.wait_group.sync.aligned 0;")
    return "{ .reg .pred p; .reg .b32 t, h, d, a<16>, b<16>; .reg .b64 v, w; " + " ".join(lines) + " }"
