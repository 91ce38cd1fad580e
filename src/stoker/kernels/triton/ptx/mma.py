"""Weights from memory straight into the operands of matrix instructions, past shared memory and Triton's layouts.

A matrix instruction (mma.sync m16n8) takes 16 rows of weights and 8 columns of tokens. Of its operands lane l of a warp holds rows l / 4
and l / 4 + 8, column l / 4, and of the features those that the hardware names by l % 4; of its sums, columns l % 4 × 2 and the one after of
its two rows. A sum doesn't care which features the hardware's are, if weights and tokens agree: so a lane reads 16 bytes of a row that lie
side by side, and uses them where they arrive. Tensors here have one element a thread: a tensor is a register of each thread, and what a
lane computes from its own number is where it stands.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

_ZEROS = "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; @p "
_LOAD_TOKENS = tl.constexpr(_ZEROS + "ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }")
_WIDEN = tl.constexpr("{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }")


@triton.jit
def load_weights(address, inside, OFFSET: tl.constexpr):
    """Four registers from 16 bytes at `address` (int64) + OFFSET, which no kernel of a step writes; zeros where not `inside`.

    A plain load before the wait for the kernel before is moved behind it by the assembler; a `relaxed` one stays.
    """
    kinds: tl.constexpr = registers(4)
    code: tl.constexpr = loading_weights(OFFSET)
    return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,l,r", [address, inside], dtype=kinds, is_pure=False, pack=1)


@triton.jit
def load_tokens(address, inside):
    """The same of what the kernel before may have written: not to be moved before the wait for it."""
    kinds: tl.constexpr = registers(4)
    return tl.inline_asm_elementwise(_LOAD_TOKENS, "=&r,=&r,=&r,=&r,l,r", [address, inside], dtype=kinds, is_pure=False, pack=1)


@triton.jit
def load_operand(address, OFFSET: tl.constexpr):
    """Four registers from 16 bytes at `address` (int64) + OFFSET, as `load_tokens`."""
    kinds: tl.constexpr = registers(4)
    code: tl.constexpr = loading(OFFSET)
    return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,l", [address], dtype=kinds, is_pure=False, pack=1)


@triton.jit
def widened(codes):
    """Two registers of float16 for each of four of e4m3."""
    kinds: tl.constexpr = registers(2)
    made = ()
    for i in tl.static_range(4):
        made = made + tl.inline_asm_elementwise(_WIDEN, "=&r,=&r,r", [codes[i]], dtype=kinds, is_pure=True, pack=1)
    return made


@triton.jit
def wide_nibbles(words, grid, SIDE: tl.constexpr, XTYPE: tl.constexpr, ZERO: tl.constexpr):
    """Eight registers of XTYPE from the low (SIDE 0) or high nibbles of four: two for each, of its bytes 0 and 2, and 1 and 3.

    grid: the scale, and unless ZERO is none (codes around 8) a whole number for the zero (int), or the value of code 0 (float).
    A code becomes the last bits of a number that is known to be 128 (of float16 1024) more, exactly; what is done to it after rounds once.
    """
    NARROW: tl.constexpr = tl.bfloat16 if XTYPE == "bfloat16" else tl.float16
    BASE: tl.constexpr = 128 if XTYPE == "bfloat16" else 1024
    scale = twice(grid[0].to(NARROW))
    if ZERO == "int":
        zero = twice((grid[1].to(tl.int32) + BASE).to(tl.float32).to(NARROW))
    else:
        zero = twice(tl.full(scale.shape, BASE + (8 if ZERO == "none" else 0), tl.float32).to(NARROW))
    low = scale
    if ZERO == "float":
        low = twice(grid[1].to(NARROW))
    kinds: tl.constexpr = registers(8)
    code: tl.constexpr = widening(SIDE, XTYPE, ZERO == "float")
    return tl.inline_asm_elementwise(
        code, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r", words + (scale, zero, low), dtype=kinds, is_pure=True, pack=1
    )


@triton.jit
def twice(value):
    """A register of the same 16-bit number in both halves."""
    return (value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def add_products(sums, upper, lower, tokens, KIND: tl.constexpr):
    """sums + a chunk's products, of an m-tile's two rows and one tile of tokens.

    KIND: bfloat16, float16 (as many registers a row as of tokens, four or two), e4m3 (twice as many of `widened` tokens), bytes, low and
    high (the nibbles of rows), upper (the high ones × 16, which takes no shift).
    sums: four registers; float32, of integers int32.
    """
    WORDS: tl.constexpr = len(upper)
    kinds: tl.constexpr = registers(4) if is_integer(KIND) else floats(4)
    given: tl.constexpr = operands(KIND, WORDS)
    code: tl.constexpr = products(KIND, WORDS)
    return tl.inline_asm_elementwise(code, given, upper + lower + tokens + sums, dtype=kinds, is_pure=True, pack=1)


@triton.constexpr_function
def loading_weights(offset):
    return _ZEROS + f"ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}]; }}"


@triton.constexpr_function
def loading(offset):
    return f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"


@triton.constexpr_function
def registers(count):
    return (tl.int32,) * count


@triton.constexpr_function
def floats(count):
    return (tl.float32,) * count


@triton.constexpr_function
def widening(side, xtype, is_float):
    """PTX of `wide_nibbles`: $0 … 7 from $8 … 11 by the scale $12, the zero $13 and the value of code 0, $14."""
    base, narrow = ("0x43004300", "bf16x2") if xtype == "bfloat16" else ("0x64006400", "f16x2")
    rounding = ".rn" if narrow == "bf16x2" else ""
    lines = []
    for word in range(4):
        for odd in range(2):
            made, shift = f"${2 * word + odd}", 4 * side + 8 * odd
            source = f"${8 + word}"
            if shift:
                lines.append(f"shr.b32 t, {source}, {shift};")
                source = "t"
            lines.append(f"lop3.b32 t, {source}, 0x000f000f, {base}, 0xea; sub{rounding}.{narrow} t, t, $13;")
            lines.append(f"fma.rn.{narrow} {made}, t, $12, $14;" if is_float else f"mul{rounding}.{narrow} {made}, t, $12;")
    return "{ .reg .b32 t; " + " ".join(lines) + " }"


@triton.constexpr_function
def is_integer(kind):
    return kind in ("bytes", "low", "high", "upper")


@triton.constexpr_function
def operands(kind, words):
    sums = "r" if kind in ("bytes", "low", "high", "upper") else "f"
    return ",".join(["=&" + sums] * 4 + ["r"] * (words * (4 if kind == "e4m3" else 3)) + [sums] * 4)


@triton.constexpr_function
def products(kind, words):
    """PTX of the matrix instructions that a chunk's registers make.

    $0 … 3 are the sums, then come `words` registers of each of the two rows, the tokens' and the sums before.
    """
    u, v = ([f"${4 + words * row + i}" for i in range(words)] for row in range(2))
    last = 4 + words * (4 if kind == "e4m3" else 3)
    t, before = [f"${i}" for i in range(4 + 2 * words, last)], [f"${last + i}" for i in range(4)]
    steps, lines = [], []  # (rows' registers, tokens' registers) of an instruction
    pairs = range(0, words, 2)
    if kind in ("bfloat16", "float16"):
        narrow = "bf16" if kind == "bfloat16" else "f16"
        name = f"m16n8k16.row.col.f32.{narrow}.{narrow}.f32"
        steps = [((u[i], v[i], u[i + 1], v[i + 1]), (t[i], t[i + 1])) for i in pairs]
    elif kind == "bytes":
        name = "m16n8k32.row.col.s32.s8.s8.s32"
        steps = [((u[i], v[i], u[i + 1], v[i + 1]), (t[i], t[i + 1])) for i in pairs]
    elif kind == "e4m3":
        name = "m16n8k16.row.col.f32.f16.f16.f32"
        for i in range(words):
            lines += [f"mov.b32 {{l, h}}, {u[i]}; cvt.rn.f16x2.e4m3x2 a{i}, l; cvt.rn.f16x2.e4m3x2 c{i}, h;"]
            lines += [f"mov.b32 {{l, h}}, {v[i]}; cvt.rn.f16x2.e4m3x2 b{i}, l; cvt.rn.f16x2.e4m3x2 d{i}, h;"]
        steps = [((f"a{i}", f"b{i}", f"c{i}", f"d{i}"), (t[2 * i], t[2 * i + 1])) for i in range(words)]
    else:
        name = f"m16n8k32.row.col.s32.{'u8' if kind == 'upper' else 's8'}.s8.s32"
        mask = "0xf0f0f0f0" if kind == "upper" else "0x0f0f0f0f"
        for i in range(words):
            shift = "" if kind != "high" else f"shr.b32 a{i}, {u[i]}, 4; shr.b32 b{i}, {v[i]}, 4; "
            sources = (f"a{i}", f"b{i}") if shift else (u[i], v[i])
            lines += [f"{shift}and.b32 a{i}, {sources[0]}, {mask}; and.b32 b{i}, {sources[1]}, {mask};"]
        steps = [((f"a{i}", f"b{i}", f"a{i + 1}", f"b{i + 1}"), (t[i], t[i + 1])) for i in pairs]
    made = "{$0, $1, $2, $3}"
    start = "{" + ", ".join(before) + "}"
    for rows, columns in steps:
        lines += [f"mma.sync.aligned.{name} {made}, {{{', '.join(rows)}}}, {{{', '.join(columns)}}}, {start};"]
        start = made
    return "{ .reg .b32 a<4>, b<4>, c<4>, d<4>; .reg .b16 l, h; " + " ".join(lines) + " }"
