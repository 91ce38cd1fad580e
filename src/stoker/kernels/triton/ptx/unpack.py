"""Stored 4- and 8-bit values converted to the dtype of a matrix operand, four values per register.

These functions work on Triton tiles of any layout, unlike the other modules of this package. Triton lowers arithmetic on 8-bit elements
one element at a time; with PACKED, inline PTX converts the four elements of a 32-bit register together. The branch without PACKED is the
definition, and what the interpreter runs.

    byte of packed int4:  bits 7–4 "high" value | bits 3–0 "low" value
    prmt selectors below: a nibble 0–3 names a byte of the first source, 4–7 a byte of the second, from the lowest byte of the result up
    lop3 with table 0xea: (a & b) | c
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.ptx.packed_arithmetic import has_bf16x2_arithmetic, multiply, subtract
from stoker.kernels.triton.ptx.registers import ptx, ptx_text


@triton.jit
def unpack_int4(packed, PACKED: tl.constexpr):
    """(low, high): the nibbles of each byte of `packed` as int8, 0 … 15."""
    if PACKED:
        low, high = tl.inline_asm_elementwise(_UNPACK_INT4, "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
        return low, high
    else:
        return (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)


@triton.jit
def unpack_int4_biased(packed, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """(low, high): the nibbles of each byte of `packed` in DTYPE, plus `int4_bias(DTYPE)`. The conversion is exact.

    With PACKED a nibble is or-ed into the fraction of the bias, whose last place is one, so no conversion instruction is needed.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_INT4_BF16, "=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        return low, high
    elif PACKED and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(_UNPACK_INT4_F16, "=&r,=&r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        return low, high
    else:
        bias: tl.constexpr = int4_bias(DTYPE)
        return ((packed & 15).to(tl.float32) + bias).to(DTYPE), ((packed >> 4).to(tl.float32) + bias).to(DTYPE)


@triton.jit
def unpack_fp4(packed, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """(low, high): the nibbles of each byte of `packed` as FP4 values (e2m1: one sign, two exponent and one fraction bit) in DTYPE. Exact.

    With PACKED the exponent and the fraction become the lowest exponent bits and the highest fraction bit of a 16-bit number, whose
    exponent is too small by the difference of the biases: 126 for bfloat16, 14 for float16. A product with that power of two corrects it,
    and turns the subnormal value 0.5 into a normal one.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        bf16_code: tl.constexpr = _unpack_fp4("bf16x2", has_bf16x2_arithmetic())
        low, high = tl.inline_asm_elementwise(bf16_code, "=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
        return low, high
    elif PACKED and tl.float16 == DTYPE:
        f16_code: tl.constexpr = _unpack_fp4("f16x2", True)
        low, high = tl.inline_asm_elementwise(f16_code, "=&r,=&r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        return low, high
    else:
        return _fp4_value(packed & 15).to(DTYPE), _fp4_value(packed >> 4).to(DTYPE)


@triton.jit
def _fp4_value(nibble):
    """float32: the e2m1 value of `nibble`, 0 … 15. Twice the value is a whole number: m, or (2 + fraction) << (exponent - 1)."""
    m = (nibble & 7).to(tl.int32)
    doubled = tl.where(m < 2, m, (2 + (m & 1)) << tl.maximum((m >> 1) - 1, 0))
    return tl.where(nibble > 7, -doubled, doubled).to(tl.float32) * 0.5


@triton.jit
def unpack_quads(words, scales, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Four tensors in DTYPE: the FP4 values of each slot of the int16 `words`, times their scales. Exact in bfloat16.

    `scales` int64 has the shape of `words`, or 1 instead of a dimension. Bits of both: see `gemm.quantized.fp4`. A value with the exponent
    that its bits have is multiplied by a scale that is larger by 2 ** 126. float16 cannot hold this, and takes more instructions.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        bf16_code: tl.constexpr = _unpack_quads("bf16x2", has_bf16x2_arithmetic())
        return tl.inline_asm_elementwise(
            bf16_code,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, _quad_scale(scales, 0), _quad_scale(scales, 1), _quad_scale(scales, 2), _quad_scale(scales, 3)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif PACKED and tl.float16 == DTYPE:
        f16_code: tl.constexpr = _unpack_quads("f16x2", True)
        real = (
            _real_quad_scale(scales, 0).to(tl.float16),
            _real_quad_scale(scales, 1).to(tl.float16),
            _real_quad_scale(scales, 2).to(tl.float16),
            _real_quad_scale(scales, 3).to(tl.float16),
        )
        return tl.inline_asm_elementwise(
            f16_code,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, real[0], real[1], real[2], real[3]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        w = words.to(tl.int32) & 0xFFFF
        rotated = (w >> 8) | ((w & 0xFF) << 8)
        return (
            _quad_value(w << 6, scales, 0, DTYPE),
            _quad_value(w << 2, scales, 1, DTYPE),
            _quad_value(rotated << 4, scales, 2, DTYPE),
            _quad_value((w & 0x8180) | (rotated & 0x40), scales, 3, DTYPE),
        )


@triton.jit
def _quad_scale(scales, SLOT: tl.constexpr):
    """bfloat16: the scale of a slot, times 2 ** 126."""
    return (scales >> (16 * SLOT)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _real_quad_scale(scales, SLOT: tl.constexpr):
    """float32: the scale of a slot."""
    bits = ((scales >> (16 * SLOT)) & 0xFFFF).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True) * 1.1754943508222875e-38  # 2 ** -126


@triton.jit
def _quad_value(fields, scales, SLOT: tl.constexpr, DTYPE: tl.constexpr):
    """The value, in DTYPE, with its fields in the bits 15 and 8 to 6 of `fields`."""
    value = _fp4_value(((fields >> 6) & 7) | ((fields >> 12) & 8))
    return (value * _real_quad_scale(scales, SLOT).to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def multiply_16bit(values, scale):
    """values × scale on two 16-bit numbers per register. Triton would widen them to 32 bits."""
    PAIR: tl.constexpr = "bf16x2" if values.dtype == tl.bfloat16 else "f16x2"
    code: tl.constexpr = _multiply_16bit(PAIR, has_bf16x2_arithmetic())
    return tl.inline_asm_elementwise(code, "=r,r,r", [values, scale], dtype=values.dtype, is_pure=True, pack=2)


@triton.jit
def dequantize_16bit(values, zero, scale, offset):
    """(values - zero) × scale, plus `offset` unless it is None, on two 16-bit numbers per register. Triton would widen them to 32 bits."""
    PAIR: tl.constexpr = "bf16x2" if values.dtype == tl.bfloat16 else "f16x2"
    if offset is None:
        code: tl.constexpr = _dequantize_16bit(PAIR, False, has_bf16x2_arithmetic())
        return tl.inline_asm_elementwise(code, "=r,r,r,r", [values, zero, scale], dtype=values.dtype, is_pure=True, pack=2)
    else:
        code_offset: tl.constexpr = _dequantize_16bit(PAIR, True, has_bf16x2_arithmetic())
        return tl.inline_asm_elementwise(code_offset, "=r,r,r,r,r", [values, zero, scale, offset], dtype=values.dtype, is_pure=True, pack=2)


@triton.constexpr_function
def int4_bias(dtype):
    """The number that `unpack_int4_biased` adds: its last fraction bit is worth one, and bits 0–3 are clear. 0 for float32. Constexpr."""
    return 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0


@triton.jit
def unpack_8bit(values, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """int8 or float8_e4m3fn values converted to DTYPE, exactly.

    int8 to bfloat16: 128 + q does not fit beside a fraction of seven bits when q is negative, so the low seven bits are or-ed into 128, and
    128, or 256 for a negative q (128 with the sign bit or-ed in), is subtracted. int8 to float16: q + 128, an unsigned byte, becomes the
    low byte of 1024, and 1152 is subtracted.
    """
    if PACKED and values.dtype == tl.int8 and tl.bfloat16 == DTYPE:
        code: tl.constexpr = _int8_to_bf16(has_bf16x2_arithmetic())
        return tl.inline_asm_elementwise(code, "=&r,=&r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif PACKED and values.dtype == tl.int8 and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(_INT8_TO_F16, "=&r,=&r,r", [values], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return values.to(DTYPE)


_UNPACK_INT4 = ptx(
    "{ and.b32 $0, $2, 0x0f0f0f0f;",  # low nibbles of four bytes
    "shr.u32 $1, $2, 4;",
    "and.b32 $1, $1, 0x0f0f0f0f; }",  # high nibbles
)

_UNPACK_INT4_BF16 = ptx(
    "{ .reg .b32 t;",
    "prmt.b32 t, $2, 0, 0x4140;",  # byte 0 to the lower half, byte 1 to the upper half, zeros above them
    "lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;",  # 0x4300 is 128.0: 128 + low nibble, twice
    "shr.u32 t, t, 4;",
    "lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea; }",  # 128 + high nibble, twice
)

_UNPACK_INT4_F16 = ptx(
    "{ .reg .b32 t;",
    "prmt.b32 t, $2, 0, 0x4140;",
    "lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea;",  # 0x6400 is 1024.0
    "shr.u32 t, t, 4;",
    "lop3.b32 $1, t, 0x000f000f, 0x64006400, 0xea; }",
)

_INT8_TO_F16 = ptx(
    "{ .reg .b32 t, u, c;",
    "xor.b32 t, $2, 0x80808080;",  # q + 128, unsigned
    "mov.b32 c, 0x64646464;",
    "prmt.b32 u, t, c, 0x4342;",  # 0x6400 | byte: 1024 + (q + 128); bytes 2 and 3
    "prmt.b32 t, t, c, 0x4140;",  # bytes 0 and 1
    "mov.b32 c, 0x64806480;",  # 1152, twice
    "sub.rn.f16x2 $0, t, c;",
    "sub.rn.f16x2 $1, u, c; }",
)


@triton.constexpr_function
def _unpack_fp4(pair, is_native):
    """PTX of `unpack_fp4`."""
    place, mask, power = (6, "0x01c001c0", "0x7e807e80") if pair == "bf16x2" else (9, "0x0e000e00", "0x74007400")  # 2 ** 126, 2 ** 14
    lines = ["{ .reg .b32 t, u, p;", f"mov.b32 p, {power};", "prmt.b32 t, $2, 0, 0x4140;"]  # byte 0 to the lower half, byte 1 to the upper
    for result, first_bit in (("$0", 0), ("$1", 4)):
        lines += [
            f"shl.b32 {result}, t, {place - first_bit};",
            f"and.b32 {result}, {result}, {mask};",  # exponent and fraction
            f"shl.b32 u, t, {12 - first_bit};",
            f"lop3.b32 {result}, u, 0x80008000, {result}, 0xea;",  # the sign
            multiply(pair, result, result, "p", is_native),
        ]
    return ptx_text(*lines, "}")


@triton.constexpr_function
def _unpack_quads(pair, is_native):
    """PTX of `unpack_quads`. Results $0 … $3; words $4; scales $5 … $8."""
    lines = [
        "{ .reg .b32 t, r;",
        "prmt.b32 r, $4, 0, 0x2301;",  # rotated: the bytes of each word exchanged
        "shl.b32 t, $4, 6;",
        "and.b32 $0, t, 0x81c081c0;",
        "shl.b32 t, $4, 2;",
        "and.b32 $1, t, 0x81c081c0;",
        "shl.b32 t, r, 4;",
        "and.b32 $2, t, 0x81c081c0;",
        "and.b32 t, $4, 0x81808180;",
        "lop3.b32 $3, r, 0x00400040, t, 0xea;",
    ]
    if pair == "f16x2":
        lines.append("mov.b32 r, 0x74007400;")  # 2 ** 14, twice
    for slot in range(4):
        if pair == "f16x2":
            lines += [
                f"shl.b32 t, ${slot}, 3;",  # exponent and fraction from bits 8 to 6 to bits 11 to 9
                "and.b32 t, t, 0x0e000e00;",
                f"lop3.b32 t, ${slot}, 0x80008000, t, 0xea;",
                f"mul.rn.f16x2 ${slot}, t, r;",
            ]
        lines.append(multiply(pair, f"${slot}", f"${slot}", f"${5 + slot}", is_native))
    return ptx_text(*lines, "}")


@triton.constexpr_function
def _multiply_16bit(pair, is_native):
    """PTX of `multiply_16bit`."""
    return ptx_text(multiply(pair, "$0", "$1", "$2", is_native))


@triton.constexpr_function
def _int8_to_bf16(is_native):
    """PTX of `unpack_8bit` from int8 to bfloat16."""
    return ptx_text(
        "{ .reg .b32 t, u, a, b;",
        "prmt.b32 t, $2, 0, 0x4140;",  # bytes 0 and 1, one per half
        "prmt.b32 u, $2, 0, 0x4342;",  # bytes 2 and 3
        "lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;",  # 128 + the low seven bits
        "lop3.b32 b, t, 0x00800080, 0x43004300, 0xea;",  # 128, or 256 where the sign bit is set
        subtract("bf16x2", "$0", "a", "b", is_native),
        "lop3.b32 a, u, 0x007f007f, 0x43004300, 0xea;",
        "lop3.b32 b, u, 0x00800080, 0x43004300, 0xea;",
        subtract("bf16x2", "$1", "a", "b", is_native) + " }",
    )


@triton.constexpr_function
def _dequantize_16bit(pair, has_offset, is_native):
    """PTX of `dequantize_16bit`."""
    last = f"fma.rn.{pair} $0, t, $3, $4;" if has_offset else multiply(pair, "$0", "t", "$3", is_native)
    return ptx_text("{ .reg .b32 t;", subtract(pair, "t", "$1", "$2", is_native), last + " }")
