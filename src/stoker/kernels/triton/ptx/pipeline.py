"""Shared memory as a ring that each warp fills for itself from memory, ahead of what it multiplies, and the meeting of all programs.

Written in Gluon, Triton's language with layouts in sight, since only it gives a kernel shared memory to keep. Tensors have one element a
thread, as in `fragments`: an address is a register, and what a thread does with it is PTX. A kernel's one allocation begins where its
shared memory begins; what Triton itself needs for reductions comes after it.

A slot of the ring holds blocks of 16 rows × 128 bytes of a weight. Eight lanes copy 128 bytes of a row, so that each request is of whole
lines; a row's eight pieces of 16 bytes change places by the row's number (exclusive or), so that neither the copies nor the reads of
operands, two rows × 64 bytes or four × 32 at a time, meet in a bank.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import float32_registers, int32_registers

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # until Triton 3.6, and since
BLOCK_BYTES = tl.constexpr(16 * 128)


@triton.constexpr_function
def groups_of_block(group):
    """Of int4, whose bytes pair features of two groups. group 0: weights have none, and nobody asks."""
    return 256 // group if group else 1


@gluon.jit
def shared_address(thread):
    """Where the kernel's shared memory begins, in every thread."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem; // $1", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_blocks(place, source, four_rows, eight_rows, sizes, lane, BLOCKS: gl.constexpr, LEAVE: gl.constexpr):
    """Copy blocks that lie side by side. place: of the slot; source (int64): this lane's piece of the first row, row lane / 8.

    four_rows (int64): bytes to four rows on; eight_rows: to the block's second eight. sizes: 16, or 0 for a block that is not there and
    becomes zeros. LEAVE: whether they leave the device's cache first, since a step reads them once.
    """
    even = place + lane // 8 * 128 + ((lane % 8) ^ (lane // 8)) * 16
    code: gl.constexpr = _copying(BLOCKS, LEAVE)
    given: gl.constexpr = "=r,r,r,l,l,l" + ",r" * BLOCKS
    gl.inline_asm_elementwise(code, given, (even, even ^ 64, source, four_rows, eight_rows) + sizes, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_word(place, source, size):
    """Copy 4 bytes a lane (size 4), or zeros (0)."""
    gl.inline_asm_elementwise(
        "cp.async.ca.shared.global [$1], [$2], 4, $3; mov.b32 $0, $1;", "=r,r,l,r", [place, source, size], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ask_piece(place, source, size, is_mine):
    """Copy 16 bytes a lane that `is_mine` (size 16), or zeros (0)."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p cp.async.cg.shared.global [$1], [$2], 16, $3; mov.b32 $0, $1; }", "=r,r,l,r,r",
        [place, source, size, is_mine.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def asked(thread):
    """What was asked for since the last call is one group, which `take_block` and `take_two_rows` wait for."""
    gl.inline_asm_elementwise("cp.async.commit_group; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_block(place, lane, AFTER: gl.constexpr):
    """16 registers of a slot's block, once all but the last AFTER groups have arrived: of both halves, rows lane / 4, then 8 on.

    The lane's bytes are 32 side by side, from lane % 4 × 32 on. Afterwards the slot may be asked for again.
    """
    even = place + lane // 4 * 128 + ((lane % 4 * 2) ^ (lane // 4)) * 16
    kinds: gl.constexpr = int32_registers(16)
    code: gl.constexpr = _taking(AFTER)
    given: gl.constexpr = "=&r," * 16 + "r,r"
    return gl.inline_asm_elementwise(code, given, [even, even ^ 16], dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def lane_row(lane):
    """The first of the two neighbouring rows of 16 that `take_two_rows` gives a lane. Fours of lanes read rows that lie in other banks."""
    four = lane // 4
    return four % 2 * 4 + four // 2 % 2 * 2 + four // 4 * 8


@gluon.jit
def take_two_rows(place, lane, PIECE: gl.constexpr, BLOCKS: gl.constexpr, AFTER: gl.constexpr):
    """16 registers for each block of a slot, as `take_block`, but of `lane_row` and the row after it, and one in four pieces.

    PIECE: their bytes, 8 or 16. The first row's piece, the second's, then those of the next 4 × PIECE bytes.
    """
    row = lane_row(lane)
    first = place + row * 128 + ((lane % 4 * PIECE // 16) ^ (row % 8)) * 16 + lane % 4 * PIECE % 16
    kinds: gl.constexpr = int32_registers(16 * BLOCKS)
    code: gl.constexpr = _taking_two_rows(PIECE, BLOCKS, AFTER)
    given: gl.constexpr = "=&r," * (16 * BLOCKS) + "r"
    return gl.inline_asm_elementwise(code, given, [first], dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def take_words(place, OFFSET: gl.constexpr, COUNT: gl.constexpr):
    """COUNT registers (1, 2 or 4) from OFFSET bytes after `place`, a multiple of their size."""
    kinds: gl.constexpr = int32_registers(COUNT)
    code: gl.constexpr = _taking_words(OFFSET, COUNT)
    return gl.inline_asm_elementwise(code, "=r," * COUNT + "r", [place], dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def take_float(place):
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [place], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def take_floats(place, COUNT: gl.constexpr):
    """2, 4 or 8 side by side."""
    kinds: gl.constexpr = float32_registers(COUNT)
    code: gl.constexpr = _taking_floats(COUNT)
    return gl.inline_asm_elementwise(code, "=&f," * COUNT + "r", [place], dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def take_two(place, KIND: gl.constexpr):
    """float32 of two neighbouring numbers of KIND: bfloat16, float16 or byte (unsigned)."""
    kinds: gl.constexpr = float32_registers(2)
    code: gl.constexpr = _taking_two(KIND)
    return gl.inline_asm_elementwise(code, "=f,=f,r", [place], dtype=kinds, is_pure=False, pack=1)


@gluon.jit
def take_number(place, KIND: gl.constexpr):
    """float32 of a number of KIND: bfloat16, float16 or byte (unsigned)."""
    code: gl.constexpr = _taking_number(KIND)
    return gl.inline_asm_elementwise(code, "=f,r", [place], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def put_float(place, value, is_mine):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.f32 [$1], $2; mov.b32 $0, $1; }", "=r,r,f,r",
        [place, value, is_mine.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put_codes(place, codes, EACH: gl.constexpr):
    """int8 codes, at addresses that rise by one, EACH (4 or 8) neighbours of a thread at a time. With four, lanes meet in banks by twos."""
    code: gl.constexpr = _putting_codes(EACH // 4)
    given: gl.constexpr = "=r," * (EACH // 4) + "r," * (EACH + EACH // 4 - 1) + "r"
    gl.inline_asm_elementwise(code, given, [place, codes], dtype=gl.int8, is_pure=False, pack=EACH)


@gluon.jit
def put_halves(place, values):
    """16-bit numbers, at addresses that rise by two, eight neighbours of a thread at a time."""
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$4], {$12, $13, $14, $15}; mov.b32 $0, $12; mov.b32 $1, $13; mov.b32 $2, $14; mov.b32 $3, $15;",
        "=r,=r,=r,=r" + ",r" * 12, [place, values], dtype=values.dtype, is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def warp_together(lane):
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(arrived, programs, is_first, thread):
    """Wait for some programs, one of which is the first; what each has stored is then visible to all. All must be on the device at once.

    arrived int32 [1]: its highest bit flips when the last one has come, so it never needs to be reset (as cooperative groups do).
    """
    barrier()
    mine = gl.where(is_first, 2147483647 - (programs - 2), 1)
    gl.inline_asm_elementwise(
        _MEETING, "=r,l,r", [thread.to(gl.int64) * 0 + arrived.to(gl.int64), thread * 0 + mine], dtype=gl.int32, is_pure=False, pack=1
    )
    barrier()


@gluon.jit
def follow(thread, USE_PDL: gl.constexpr):
    """Wait for the kernel before, then let the next one start (see `chain`)."""
    if USE_PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


_MEETING = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t, o, n; mov.u32 t, %tid.x; setp.ne.b32 p, t, 0; @p bra MET; "
    "atom.global.gpu.acq_rel.add.u32 o, [$1], $2; "
    "AGAIN: ld.acquire.gpu.global.b32 n, [$1]; xor.b32 n, n, o; setp.ge.s32 p, n, 0; @p bra AGAIN; MET: mov.u32 $0, t; }"
)


@triton.constexpr_function
def _copying(blocks, leave):
    """PTX of `ask_blocks`: $1 and $2 are where rows of even and odd fours go, $3 the source, $4 and $5 ways to rows, then the sizes."""
    lines = ["add.s64 a, $3, $4; add.s64 b, $3, $5; add.s64 c, b, $4;"]
    hint, policy = (".L2::cache_hint", ", q") if leave else ("", "")
    if leave:
        lines.append("createpolicy.fractional.L2::evict_first.b64 q, 1.0;")
    for block in range(blocks):
        for four, source in enumerate(("$3", "a", "b", "c")):
            target = f"[${1 + four % 2} + {BLOCK_BYTES.value * block + 512 * four}]"
            lines.append(f"cp.async.cg.shared.global{hint}.L2::128B {target}, [{source} + {128 * block}], 16, ${6 + block}{policy};")
    return "{ .reg .b64 a, b, c, q; " + " ".join(lines) + " mov.b32 $0, $1; }"


@triton.constexpr_function
def _taking(after):
    """PTX of `take_block`. What other lanes copied is there once they, too, have waited."""
    lines = [f"cp.async.wait_group {after}; bar.warp.sync 0xffffffff;"]
    for half in range(2):
        for lower in range(2):
            words = ", ".join(f"${8 * half + 4 * lower + i}" for i in range(4))
            lines.append(f"ld.shared.v4.b32 {{{words}}}, [${16 + half} + {1024 * lower}];")
    return " ".join(lines) + " bar.warp.sync 0xffffffff;"


@triton.constexpr_function
def _taking_two_rows(piece, blocks, after):
    """PTX of `take_two_rows`. The second row's pieces have changed places by one more."""
    each, count, lines = piece // 4, 16 * blocks, [f"cp.async.wait_group {after}; bar.warp.sync 0xffffffff;"]
    for i in range(32 // piece):
        for second in range(2):
            lines.append(f"xor.b32 a, ${count}, {4 * piece * i + 16 * second};")
            for block in range(blocks):
                words = ", ".join(f"${16 * block + 2 * each * i + each * second + word}" for word in range(each))
                lines.append(f"ld.shared.v{each}.b32 {{{words}}}, [a + {BLOCK_BYTES.value * block + 128 * second}];")
    return "{ .reg .b32 a; " + " ".join(lines) + " bar.warp.sync 0xffffffff; }"


@triton.constexpr_function
def _taking_floats(count):
    parts = [range(first, min(first + 4, count)) for first in range(0, count, 4)]
    return " ".join(f"ld.shared.v{len(part)}.f32 {{{', '.join(f'${i}' for i in part)}}}, [${count} + {4 * part[0]}];" for part in parts)


@triton.constexpr_function
def _taking_two(kind):
    if kind == "byte":
        return (
            "{ .reg .b16 w, l, h; ld.shared.b16 w, [$2]; and.b16 l, w, 255; shr.u16 h, w, 8; cvt.rn.f32.u16 $0, l; cvt.rn.f32.u16 $1, h; }"
        )
    if kind == "float16":
        return "{ .reg .b16 l, h; ld.shared.v2.b16 {l, h}, [$2]; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return "{ .reg .b32 w, l, h; ld.shared.b32 w, [$2]; shl.b32 l, w, 16; and.b32 h, w, 0xffff0000; mov.b32 $0, l; mov.b32 $1, h; }"


@triton.constexpr_function
def _putting_codes(words):
    """PTX of `put_codes`: so many words given back, the addresses of their bytes, the words."""
    given = [f"${5 * words + i}" for i in range(words)]
    return f"st.shared.v{words}.b32 [${words}], {{{', '.join(given)}}};".replace(".v1", "") + "".join(
        f" mov.b32 ${i}, {word};" for i, word in enumerate(given)
    )


@triton.constexpr_function
def _taking_words(offset, count):
    names = ", ".join(f"${i}" for i in range(count))
    return f"ld.shared.v{count}.b32 {{{names}}}, [${count} + {offset}];" if count > 1 else f"ld.shared.b32 $0, [$1 + {offset}];"


@triton.constexpr_function
def _taking_number(kind):
    if kind == "byte":
        return "{ .reg .b16 h; ld.shared.u8 h, [$1]; cvt.rn.f32.u16 $0, h; }"
    if kind == "float16":
        return "{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.f32.f16 $0, h; }"
    return "{ .reg .b16 h, z; .reg .b32 w; mov.b16 z, 0; ld.shared.b16 h, [$1]; mov.b32 w, {z, h}; mov.b32 $0, w; }"
