"""Register fragments for the warp-level matrix instruction `mma.sync.m16n8`: loads, conversions and products.

Weights go from global memory directly into the fragments of the instruction, without shared memory and without Triton's layouts.

Formula: acc[16 rows, 8 tokens] += weights[16 rows, k] × tokens[k, 8 tokens], with k = 16 features of 16 bits, or 32 of 8 bits.

Layout that the hardware defines ("Warp Level Matrix Multiply-Accumulate Instructions" of the PTX ISA), for lane l of a warp with
g = l / 4 and c = l % 4. A register holds two 16-bit features or four 8-bit ones:

    A, weights                   B, tokens                     C and D, sums (float32 or int32)
                features                     features
               low k  high k                low k  high k                  token 2c  token 2c + 1
    row g        a0     a2       token g      b0     b1        row g          c0         c1
    row g + 8    a1     a3                                     row g + 8      c2         c3

The hardware numbers the features of a register by c: with 16 bits, a0 holds features 2c and 2c + 1, and a2 holds 2c + 8 and 2c + 9. A
sum over features does not depend on their order, as long as A and B agree. So a lane loads 16 *contiguous* bytes of a row of the weight,
four registers u0 … u3, and 16 contiguous bytes of a token, t0 … t3, and passes them where they arrive:

    first instruction    (a0, a1, a2, a3) = (u0, v0, u1, v1)    (b0, b1) = (t0, t1)     u: 16 bytes of row g
    second instruction   (a0, a1, a2, a3) = (u2, v2, u3, v3)    (b0, b1) = (t2, t3)     v: 16 bytes of row g + 8

Four lanes with the same g read 64 contiguous bytes of a row: a *chunk*.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.ptx.packed_arithmetic import has_bf16x2_arithmetic, multiply, subtract
from stoker.kernels.triton.ptx.registers import float32_registers, int32_registers, ptx, ptx_text


@triton.jit
def load_weight_fragment(address, mask, OFFSET: tl.constexpr):
    """Four registers from the 16 bytes at `address` (int64) + OFFSET, zeros where `mask` is 0.

    For memory that no kernel of a step writes: the load is `ld.relaxed`, because the assembler moves a plain load behind
    `griddepcontrol.wait`. A relaxed one stays in front of it, so that weights are loaded while the previous kernel still runs.
    """
    types: tl.constexpr = int32_registers(4)
    code: tl.constexpr = _load_weight_fragment(OFFSET)
    return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,l,r", [address, mask], dtype=types, is_pure=False, pack=1)


@triton.jit
def load_token_fragment(address, mask):
    """Four registers from the 16 bytes at `address` (int64), zeros where `mask` is 0.

    For activations, which the previous kernel may have written: a plain load is not moved in front of `griddepcontrol.wait`.
    """
    types: tl.constexpr = int32_registers(4)
    return tl.inline_asm_elementwise(_LOAD_TOKEN_FRAGMENT, "=&r,=&r,=&r,=&r,l,r", [address, mask], dtype=types, is_pure=False, pack=1)


@triton.jit
def load_fragment(address, OFFSET: tl.constexpr):
    """Four registers from the 16 bytes at `address` (int64) + OFFSET, by a plain load without a mask (see `load_token_fragment`)."""
    types: tl.constexpr = int32_registers(4)
    code: tl.constexpr = _load_fragment(OFFSET)
    return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,l", [address], dtype=types, is_pure=False, pack=1)


@triton.jit
def e4m3_to_f16(words):
    """Eight registers with two float16 values each, from four registers with four e4m3 values each."""
    types: tl.constexpr = int32_registers(2)
    halves = ()
    for i in tl.static_range(4):
        halves = halves + tl.inline_asm_elementwise(_E4M3_TO_F16, "=&r,=&r,r", [words[i]], dtype=types, is_pure=True, pack=1)
    return halves


@triton.jit
def dequantize_int4(words, scale_zero, SIDE: tl.constexpr, XTYPE: tl.constexpr, ZERO: tl.constexpr):
    """Eight registers of two XTYPE values each, from the low (SIDE 0) or high (SIDE 1) nibbles of four registers.

    Register 2i + j of the result holds the nibbles of bytes j and j + 2 of words[i].
    scale_zero: (scale,), or (scale, zero) if ZERO is "int" or "float". Values are (q - 8) × scale ("none"), (q - zero) × scale ("int", a
    whole number), q × scale + zero ("float") or the FP4 value of q × scale ("e2m1", see `unpack.unpack_fp4`).

    A nibble is or-ed into the lowest fraction bits of 128 (bfloat16) or 1024 (float16), which gives exactly 128 + q or 1024 + q. The
    subtraction that follows is exact too, so a value is rounded once, by the multiplication.
    """
    DTYPE: tl.constexpr = tl.bfloat16 if XTYPE == "bfloat16" else tl.float16
    BIAS: tl.constexpr = 128 if XTYPE == "bfloat16" else 1024
    scale = pack_twice(scale_zero[0].to(DTYPE))
    if ZERO == "e2m1":
        zero = pack_twice(tl.full(scale.shape, 2.0**126 if XTYPE == "bfloat16" else 2.0**14, tl.float32).to(DTYPE))
    elif ZERO == "int":
        zero = pack_twice((scale_zero[1].to(tl.int32) + BIAS).to(tl.float32).to(DTYPE))
    else:
        zero = pack_twice(tl.full(scale.shape, BIAS + (8 if ZERO == "none" else 0), tl.float32).to(DTYPE))
    offset = scale
    if ZERO == "float":
        offset = pack_twice(scale_zero[1].to(DTYPE))
    types: tl.constexpr = int32_registers(8)
    code: tl.constexpr = _dequantize_int4(SIDE, XTYPE, ZERO, has_bf16x2_arithmetic())
    return tl.inline_asm_elementwise(
        code,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
        words + (scale, zero, offset),
        dtype=types,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pack_twice(value):
    """A 32-bit register with the same 16-bit value in both halves."""
    return (value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def mma_m16n8(acc, upper, lower, tokens, KIND: tl.constexpr):
    """acc + the products of a chunk of 16 rows and one tile of 8 tokens, with as many instructions as the registers fill.

    acc: four registers c0 … c3; float32, or int32 for integer KINDs. upper, lower: registers of rows g and g + 8. tokens: registers of
    token g.

    | KIND | weights in a register | tokens | registers |
    |---|---|---|---|
    | bfloat16, float16 | 2 values | the same dtype | as many of tokens as of a row |
    | e4m3 | 4 e4m3, converted to float16 here | float16 (`e4m3_to_f16`) | twice as many of tokens |
    | bytes | 4 int8 | int8 | as many |
    | low, high | low or high nibbles of 4 bytes | int8 | as many |
    | upper | high nibbles where they are: their values × 16, without a shift | int8 | as many |
    """
    WORDS: tl.constexpr = len(upper)
    types: tl.constexpr = int32_registers(4) if is_integer(KIND) else float32_registers(4)
    constraints: tl.constexpr = _mma_constraints(KIND, WORDS)
    code: tl.constexpr = _mma_chunk(KIND, WORDS)
    return tl.inline_asm_elementwise(code, constraints, upper + lower + tokens + acc, dtype=types, is_pure=True, pack=1)


@triton.constexpr_function
def is_integer(kind):
    """Whether products of this KIND are summed in int32."""
    return kind in ("bytes", "low", "high", "upper")


_LOAD_TOKEN_FRAGMENT = ptx(
    "{ .reg .pred p;",
    "setp.ne.b32 p, $5, 0;",  # p: the mask
    "mov.b32 $0, 0;",  # zeros where the mask is 0
    "mov.b32 $1, 0;",
    "mov.b32 $2, 0;",
    "mov.b32 $3, 0;",
    "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",  # 16 bytes per lane
    "}",
)

_E4M3_TO_F16 = ptx(
    "{ .reg .b16 l, h;",
    "mov.b32 {l, h}, $2;",  # bytes 0 and 1, bytes 2 and 3
    "cvt.rn.f16x2.e4m3x2 $0, l;",  # exact: every e4m3 value is a float16
    "cvt.rn.f16x2.e4m3x2 $1, h;",
    "}",
)


@triton.constexpr_function
def _load_weight_fragment(offset):
    """PTX of `load_weight_fragment`. Operands: results $0 … $3, address $4, mask $5."""
    return ptx_text(
        "{ .reg .pred p;",
        "setp.ne.b32 p, $5, 0;",  # p: the mask
        "mov.b32 $0, 0;",  # zeros where the mask is 0
        "mov.b32 $1, 0;",
        "mov.b32 $2, 0;",
        "mov.b32 $3, 0;",
        # relaxed: stays in front of griddepcontrol.wait. no_allocate: weights are read once, and would evict tokens from L1.
        # L2::128B: the neighbouring lanes' sectors of the same line are fetched together.
        f"@p ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];",
        "}",
    )


@triton.constexpr_function
def _load_fragment(offset):
    """PTX of `load_fragment`. Operands: results $0 … $3, address $4."""
    return f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"


@triton.constexpr_function
def _dequantize_int4(side, xtype, zero, is_native):
    """PTX of `dequantize_int4`. Results $0 … $7; words $8 … $11; scale $12, zero + bias $13, offset $14, each twice in its register.

    For e2m1, $13 is the power of two that corrects the exponent.
    """
    if zero == "e2m1":
        return _dequantize_fp4(side, xtype, is_native)
    bias, pair = ("0x43004300", "bf16x2") if xtype == "bfloat16" else ("0x64006400", "f16x2")  # 128 and 1024, twice
    lines = ["{ .reg .b32 t;"]
    for word in range(4):
        for odd in range(2):
            result, source, shift = f"${2 * word + odd}", f"${8 + word}", 4 * side + 8 * odd
            if shift:
                lines.append(f"shr.b32 t, {source}, {shift};")  # the nibbles of bytes odd and odd + 2 to bits 0–3 and 16–19
                source = "t"
            lines.append(f"lop3.b32 t, {source}, 0x000f000f, {bias}, 0xea;")  # (source & mask) | bias: bias + q, twice
            lines.append(subtract(pair, "t", "t", "$13", is_native))  # q - zero, exact
            if zero == "float":
                lines.append(f"fma.rn.{pair} {result}, t, $12, $14;")  # q × scale + offset
            else:
                lines.append(multiply(pair, result, "t", "$12", is_native))  # (q - zero) × scale
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _dequantize_fp4(side, xtype, is_native):
    """PTX of `dequantize_int4` for e2m1, with the operands of `_dequantize_int4`."""
    place, mask, pair = (6, "0x01c001c0", "bf16x2") if xtype == "bfloat16" else (9, "0x0e000e00", "f16x2")
    lines = ["{ .reg .b32 t, u;"]
    for word in range(4):
        for odd in range(2):
            result, source, first_bit = f"${2 * word + odd}", f"${8 + word}", 4 * side + 8 * odd  # of the nibble in its half
            lines.append(_shift_left("t", source, place - first_bit))
            lines.append(_shift_left("u", source, 12 - first_bit))
            lines.append(f"and.b32 t, t, {mask};")  # exponent and fraction
            lines.append("lop3.b32 t, u, 0x80008000, t, 0xea;")  # the sign
            lines.append(multiply(pair, "t", "t", "$13", is_native))  # the e2m1 value, exact
            lines.append(multiply(pair, result, "t", "$12", is_native))  # value × scale
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _shift_left(result, source, bits):
    """PTX of result = source << bits, or source >> -bits."""
    return f"shl.b32 {result}, {source}, {bits};" if bits >= 0 else f"shr.b32 {result}, {source}, {-bits};"


@triton.constexpr_function
def _mma_constraints(kind, words):
    """Operand constraints of `mma_m16n8`: four results, the registers of both rows and of the tokens, and the accumulators."""
    acc = "r" if kind in ("bytes", "low", "high", "upper") else "f"
    return ",".join(["=&" + acc] * 4 + ["r"] * (words * (4 if kind == "e4m3" else 3)) + [acc] * 4)


@triton.constexpr_function
def _mma_chunk(kind, words):
    """PTX of `mma_m16n8`. Results $0 … $3; then `words` registers of row g, `words` of row g + 8, the tokens', and the accumulators."""
    u, v = ([f"${4 + words * row + i}" for i in range(words)] for row in range(2))
    last = 4 + words * (4 if kind == "e4m3" else 3)
    t, before = [f"${i}" for i in range(4 + 2 * words, last)], [f"${last + i}" for i in range(4)]
    fragments, lines = [], ["{ .reg .b32 a<4>, b<4>, c<4>, d<4>;", ".reg .b16 l, h;"]  # fragments: (A, B) of each instruction
    pairs = range(0, words, 2)
    if kind in ("bfloat16", "float16"):
        name = "bf16" if kind == "bfloat16" else "f16"
        instruction = f"m16n8k16.row.col.f32.{name}.{name}.f32"
        fragments = [((u[i], v[i], u[i + 1], v[i + 1]), (t[i], t[i + 1])) for i in pairs]
    elif kind == "bytes":
        instruction = "m16n8k32.row.col.s32.s8.s8.s32"
        fragments = [((u[i], v[i], u[i + 1], v[i + 1]), (t[i], t[i + 1])) for i in pairs]
    elif kind == "e4m3":
        instruction = "m16n8k16.row.col.f32.f16.f16.f32"
        for i in range(words):
            lines += [
                f"mov.b32 {{l, h}}, {u[i]};",  # four e4m3 of row g: bytes 0 and 1, bytes 2 and 3
                f"cvt.rn.f16x2.e4m3x2 a{i}, l;",
                f"cvt.rn.f16x2.e4m3x2 c{i}, h;",
                f"mov.b32 {{l, h}}, {v[i]};",  # four of row g + 8
                f"cvt.rn.f16x2.e4m3x2 b{i}, l;",
                f"cvt.rn.f16x2.e4m3x2 d{i}, h;",
            ]
        fragments = [((f"a{i}", f"b{i}", f"c{i}", f"d{i}"), (t[2 * i], t[2 * i + 1])) for i in range(words)]
    else:
        # High nibbles in place are unsigned bytes, q × 16; low or shifted ones are 0 … 15, and signed and unsigned are the same.
        instruction = f"m16n8k32.row.col.s32.{'u8' if kind == 'upper' else 's8'}.s8.s32"
        mask = "0xf0f0f0f0" if kind == "upper" else "0x0f0f0f0f"
        for i in range(words):
            sources = (u[i], v[i])
            if kind == "high":
                lines += [f"shr.b32 a{i}, {u[i]}, 4;", f"shr.b32 b{i}, {v[i]}, 4;"]
                sources = (f"a{i}", f"b{i}")
            lines += [f"and.b32 a{i}, {sources[0]}, {mask};", f"and.b32 b{i}, {sources[1]}, {mask};"]
        fragments = [((f"a{i}", f"b{i}", f"a{i + 1}", f"b{i + 1}"), (t[i], t[i + 1])) for i in pairs]
    results = "{$0, $1, $2, $3}"
    addend = "{" + ", ".join(before) + "}"
    for a, b in fragments:
        # D = A × B + C: the first instruction adds the sums before, each later one the result of the one before it.
        lines.append(f"mma.sync.aligned.{instruction} {results}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {addend};")
        addend = results
    return "\n".join([*lines, "}"])
