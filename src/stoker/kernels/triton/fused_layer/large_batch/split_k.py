"""Sums over parts of a linear's features, sent by the programs that have the parts to those that finish the rows.

A message's word is a float32 whose last bit is set, one part in 2^23, so a word that is not zero has arrived. Its one reader makes it zero
again, and leaves all as the next linear and the next launch want them. What it replaces, a meeting of the programs (stores, a fence, an
atomic operation, a load that waits) before the sums are loaded, takes 1.3 µs of a linear's 10 to 20 (8B shapes, 32 tokens).
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.schedule import blocks_of, share_of
from stoker.kernels.triton.fused_layer.linear_args import LENGTH
from stoker.kernels.triton.ptx.registers import float32_registers

AT_ONCE = gl.constexpr(16)  # messages of 16 bytes that a lane waits for together


@triton.constexpr_function
def columns_at_once(parts, tokens):
    """Eights of tokens whose sums a lane takes at once."""
    return max(1, min(tokens // 8, AT_ONCE.value // 4 // parts))


@gluon.jit
def place_of_sums(messages, tile, part, piece, PARTS: gl.constexpr, TOKENS: gl.constexpr):
    """Where the sums of a part of a tile's features lie, of the group that has its first block or of the next one."""
    return messages.to(gl.int64) + ((tile * PARTS + part) * 2 + piece).to(gl.int64) * (256 * TOKENS)


@gluon.jit
def send_sums(place, sums, TOKENS: gl.constexpr):
    """Store all of a lane's sums (TOKENS / 2 float registers) from `place` (int64), 16 bytes of eight tokens' rows, on."""
    COUNT: gl.constexpr = TOKENS // 2
    code: gl.constexpr = _sending(COUNT)
    gl.inline_asm_elementwise(code, "=r,l" + ",r" * COUNT, (place,) + sums, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sums_of(link, place, nth, tiles, thread, PARTS: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr):
    """Four float registers of a lane for each of COLUMNS eights of tokens: a tile's sums over all features, once all have come.

    place (int64): of the lane's first ones. nth: which of the program's tiles it is.
    """
    _, last = blocks_of(link[LENGTH], PARTS - 1, PARTS)
    cut = thread * 0 + is_cut(nth, tiles, gl.cdiv(link[LENGTH], PARTS))
    last_cut = thread * 0 + is_cut(nth, tiles, last)
    kinds: gl.constexpr = float32_registers(4 * COLUMNS)
    code: gl.constexpr = _taking(PARTS, COLUMNS, 256 * TOKENS)
    given: gl.constexpr = "=&f," * (4 * COLUMNS) + "l,r,r"
    return gl.inline_asm_elementwise(code, given, [place, cut, last_cut], dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def is_cut(nth, tiles, blocks):
    """Whether two groups have blocks of a program's tile of that number: 1 or 0."""
    share = share_of(tiles, blocks)
    return gl.where(nth * blocks % share + blocks > share, 1, 0)


@triton.constexpr_function
def _sending(count):
    lines = []
    for first in range(0, count, 4):
        lines += [f"or.b32 t{i}, ${2 + first + i}, 1;" for i in range(4)]
        lines.append(f"st.relaxed.gpu.global.v4.b32 [$1 + {512 * first}], {{t0, t1, t2, t3}};")
    return "{ .reg .b32 t<4>; " + " ".join(lines) + " mov.b32 $0, 0; }"


@triton.constexpr_function
def _taking(parts, columns, size):
    """PTX of `sums_of`: after the outputs the place, and whether tiles are cut, those of the last part too. size: of a part's sums.

    All messages are looked at together, again and again: one after another would be that many waits for memory.
    """
    count = 4 * columns
    place, cut, last_cut = (f"${count + i}" for i in range(3))
    lines = [f"mov.f32 ${i}, 0f00000000;" for i in range(count)]
    lines.append(f"setp.ne.b32 p, {cut}, 0; setp.ne.b32 q, {last_cut}, 0;")
    messages = [(part, piece, column) for part in range(parts) for piece in range(2) for column in range(columns)]
    for begin in range(0, len(messages), AT_ONCE.value):
        loads, least, adds = [], [], []
        for at, message in enumerate(messages[begin : begin + AT_ONCE.value]):
            part, piece, column = message
            guard = "" if piece == 0 else "@q " if part == parts - 1 else "@p "
            words = [f"w{4 * at + i}" for i in range(4)]
            where = f"[{place} + {(2 * part + piece) * size + 2048 * column}]"
            lines += [f"mov.b32 {word}, 1;" for word in words]
            loads.append(f"{guard}ld.relaxed.gpu.global.v4.b32 {{{', '.join(words)}}}, {where};")
            least += [f"min.u32 t, t, {word};" for word in words]
            sums = [f"${4 * column + i}" for i in range(4)]
            adds += [f"mov.b32 f, {words[i]}; {guard}add.f32 {sums[i]}, {sums[i]}, f;" for i in range(4)]
            adds.append(f"{guard}st.relaxed.gpu.global.v4.b32 {where}, {{z, z, z, z}};")
        lines += [f"WAIT{begin}: mov.b32 t, 1;", *loads, *least, f"setp.eq.b32 r, t, 0; @r bra WAIT{begin};", *adds]
    registers = f".reg .pred p, q, r; .reg .f32 f; .reg .b32 t, z, w<{4 * AT_ONCE.value}>;"
    return "{ " + registers + " mov.b32 z, 0; " + " ".join(lines) + " }"
