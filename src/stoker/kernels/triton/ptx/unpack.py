"""Stored integers made into operands of a matrix instruction, four a register.

Triton lowers arithmetic on 8-bit elements one at a time; PACKED, for a GPU, takes four in one register. The plain branch says what it
means.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibbles(codes, PACKED: tl.constexpr):
    """int8 (low, high) of each byte, 0 … 15."""
    if PACKED:
        low, high = tl.inline_asm_elementwise(
            "{ and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f; }",
            "=&r,=&r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
        return low, high
    else:
        return (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)


@triton.jit
def wide_nibbles(codes, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """DTYPE of code + 128 (bfloat16), + 1024 (float16) or + 0 (float32), (low, high) of each byte: `nibble_base` is what was added.

    A code is or-ed into the fraction bits of a number whose last place is one.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            prmt.b32 t, $2, 0, 0x4140; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, t, 4; lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea; }""",
            "=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return low, high
    elif PACKED and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            prmt.b32 t, $2, 0, 0x4140; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea;
            shr.u32 t, t, 4; lop3.b32 $1, t, 0x000f000f, 0x64006400, 0xea; }""",
            "=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return low, high
    else:
        base: tl.constexpr = nibble_base(DTYPE)
        return ((codes & 15).to(tl.float32) + base).to(DTYPE), ((codes >> 4).to(tl.float32) + base).to(DTYPE)


@triton.jit
def shifted_and_scaled(codes, zero, scale, low):
    """(codes - zero) × scale, + low unless it is None, of 16-bit numbers two at a time: the compiler would widen them to 32 bits for it."""
    narrow: tl.constexpr = "bf16x2" if codes.dtype == tl.bfloat16 else "f16x2"
    if low is None:
        code: tl.constexpr = "{ .reg .b32 t; sub.rn." + narrow + " t, $1, $2; mul.rn." + narrow + " $0, t, $3; }"
        return tl.inline_asm_elementwise(code, "=r,r,r,r", [codes, zero, scale], dtype=codes.dtype, is_pure=True, pack=2)
    else:
        code_low: tl.constexpr = "{ .reg .b32 t; sub.rn." + narrow + " t, $1, $2; fma.rn." + narrow + " $0, t, $3, $4; }"
        return tl.inline_asm_elementwise(code_low, "=r,r,r,r,r", [codes, zero, scale, low], dtype=codes.dtype, is_pure=True, pack=2)


@triton.constexpr_function
def nibble_base(dtype):
    return 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0


@triton.jit
def wide_bytes(codes, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """int8 or float8_e4m3fn as DTYPE, exactly.

    bfloat16 has no room for a byte beside 128: the low seven bits are or-ed into 128, and the sign decides whether 128 or 256 is taken off.
    """
    if PACKED and codes.dtype == tl.int8 and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, a, b;
            prmt.b32 t, $2, 0, 0x4140; prmt.b32 u, $2, 0, 0x4342;
            lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, t, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $0, a, b;
            lop3.b32 a, u, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, u, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $1, a, b; }""",
            "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    elif PACKED and codes.dtype == tl.int8 and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, c;
            xor.b32 t, $2, 0x80808080; mov.b32 c, 0x64646464;
            prmt.b32 u, t, c, 0x4342; prmt.b32 t, t, c, 0x4140;
            mov.b32 c, 0x64806480;
            sub.rn.f16x2 $0, t, c; sub.rn.f16x2 $1, u, c; }""",
            "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(DTYPE)
