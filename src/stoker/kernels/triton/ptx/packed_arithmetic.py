"""PTX for differences and products of two 16-bit numbers per register, on every compute capability.

sm_80 and sm_89 have no sub.bf16x2 and mul.bf16x2. There a fused multiply-add gives the same results:

    a - b = b × -1.0 + a             a × b = a × b + -0.0 (which keeps the sign of a zero)
"""

from __future__ import annotations

import triton
from triton.language.target_info import current_target

from stoker.kernels.triton.device import REQUIREMENTS


@triton.constexpr_function
def has_bf16x2_arithmetic():
    """Whether the compilation target has sub.bf16x2 and mul.bf16x2."""
    target = current_target()
    return target is not None and REQUIREMENTS["bf16x2_arithmetic"].is_met(int(target.arch))


@triton.constexpr_function
def subtract(pair, result, a, b, is_native):
    """PTX of result = a - b, for two values per register. `pair` is their type, bf16x2 or f16x2.

    `is_native`: the device has the instruction for bf16x2. The operands must not be registers named `c`.
    """
    if pair == "f16x2" or is_native:
        return f"sub.rn.{pair} {result}, {a}, {b};"
    return f"{{ .reg .b32 c; mov.b32 c, 0xbf80bf80; fma.rn.{pair} {result}, {b}, c, {a}; }}"  # c: -1.0, twice


@triton.constexpr_function
def multiply(pair, result, a, b, is_native):
    """PTX of result = a × b, for two values per register. `pair` is their type, bf16x2 or f16x2.

    `is_native`: the device has the instruction for bf16x2. The operands must not be registers named `c`.
    """
    if pair == "f16x2" or is_native:
        return f"mul.rn.{pair} {result}, {a}, {b};"
    return f"{{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.{pair} {result}, {a}, {b}, c; }}"  # c: -0.0, twice
