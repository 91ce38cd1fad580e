"""Caches of 8-bit numbers read two features at a time, as int16.

Of 8-bit elements Triton makes matrix operands by way of shared memory, there and back: matrix loads transpose 16-bit elements only. So a
decode takes pairs of neighbouring features as 16-bit elements, which arrive in registers where a matrix instruction wants them, and
unpacks there: the even features are one operand, the odd ones another. 512 rows over 1,500 keys of e4m3: 703 µs before, 407 so.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The bits of e4m3, its exponent's and fraction's seven moved right by one, are a float16: the same number times 2^-8. NaN becomes 1.875.
_LOW_E4M3 = tl.constexpr(
    "{ .reg .b32 s, t; shl.b32 s, $1, 8; and.b32 t, s, 0x7f007f00; shr.u32 t, t, 1; lop3.b32 $0, s, 0x80008000, t, 0xEA; }"
)
_HIGH_E4M3 = tl.constexpr("{ .reg .b32 t; and.b32 t, $1, 0x7f007f00; shr.u32 t, t, 1; lop3.b32 $0, $1, 0x80008000, t, 0xEA; }")
# 0x64xx is 1024 + xx in float16; with the sign bit turned over, xx is the int8 plus 128.
_LOW_INT8 = tl.constexpr(
    "{ .reg .b32 s, k; mov.b32 k, 0x64646464; xor.b32 s, $1, 0x80808080; prmt.b32 s, s, k, 0x4240; "
    "mov.b32 k, 0xe480e480; add.rn.f16x2 $0, s, k; }"
)
_HIGH_INT8 = tl.constexpr(
    "{ .reg .b32 s, k; mov.b32 k, 0x64646464; xor.b32 s, $1, 0x80808080; prmt.b32 s, s, k, 0x4341; "
    "mov.b32 k, 0xe480e480; add.rn.f16x2 $0, s, k; }"
)


@triton.constexpr_function
def pair_scale(kind):
    """What the numbers of `halves` are to be multiplied by."""
    return 256.0 if kind == "e4m3" else 1.0


@triton.jit
def halves(pairs, KIND: tl.constexpr, PACKED: tl.constexpr):
    """float16 (low, high) of int16 pairs of e4m3 (times 2^-8) or int8. PACKED: for a GPU; the other branches say what it means."""
    if PACKED:
        low = tl.inline_asm_elementwise(_LOW_E4M3 if KIND == "e4m3" else _LOW_INT8, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(
            _HIGH_E4M3 if KIND == "e4m3" else _HIGH_INT8, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
        return low, high
    else:
        low, high = pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8)
        if KIND == "e4m3":
            low = low.to(tl.float8e4nv, bitcast=True).to(tl.float16) * 0.00390625
            high = high.to(tl.float8e4nv, bitcast=True).to(tl.float16) * 0.00390625
            return low, high
        else:
            return low.to(tl.int8, bitcast=True).to(tl.float16), high.to(tl.int8, bitcast=True).to(tl.float16)
