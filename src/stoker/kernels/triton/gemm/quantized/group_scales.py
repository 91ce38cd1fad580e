"""Scales and zero points of groups of input features, in the four kinds that int4 and grouped int8 weights have.

zero kind    stored                        real value of a stored value q
none         scale                         (q - 8) × scale                int4 only; grouped int8: q × scale
int          scale, uint8 zero point       (q - zero) × scale
float        scale, float offset           q × scale + offset
e2m1         scale                         e2m1(q) × scale                int4 only: q is an FP4 value (`ptx.unpack.unpack_fp4`)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def group_tensors(zero):
    """The number of tensors that a group of the zero kind `zero` has: 1, the scale, or 2, with a zero point or an offset."""
    return 2 if zero in ("int", "float") else 1


@triton.jit
def load_scale_and_zero(scale_ptr, zero_ptr, offset, ZERO: tl.constexpr):
    """(scale,) or (scale, zero point or offset), in their stored dtypes, loaded at the element offsets `offset`."""
    if group_tensors(ZERO) == 1:
        return (tl.load(scale_ptr + offset),)
    else:
        return (tl.load(scale_ptr + offset), tl.load(zero_ptr + offset))


@triton.jit
def scale_and_offset(stored, ZERO: tl.constexpr):
    """(scale, offset), float32, from a result of `load_scale_and_zero` for int4: the real value of q is q × scale + offset."""
    s = stored[0].to(tl.float32)
    if ZERO == "none":
        return s, s * -8.0
    elif ZERO == "int":
        return s, -s * stored[1].to(tl.float32)
    else:
        return s, stored[1].to(tl.float32)


@triton.jit
def load_pair_scales(
    scale_ptr,
    zero_ptr,
    col,  # the first input feature
    rows,  # [BLOCK_N]: rows of the weight
    n,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    GATED: tl.constexpr,
):
    """A flat tuple with the scales and zeros of PAIRS pairs of int4 groups, from input feature `col` on.

    The tensors of each pair (zeros are absent for the kinds none and e2m1):

    scale, zero of the low group | scale, zero of the high group | the same two of the up rows, which are n rows further, when GATED
    """
    ROWS = n * (2 if GATED else 1)  # the scales are [groups, ROWS]
    loaded = ()
    for pair in tl.static_range(PAIRS):
        offset = (col // GROUP + 2 * pair) * ROWS + rows
        low = load_scale_and_zero(scale_ptr, zero_ptr, offset, ZERO)
        high = load_scale_and_zero(scale_ptr, zero_ptr, offset + ROWS, ZERO)
        loaded = loaded + low + high
        if GATED:
            low_up = load_scale_and_zero(scale_ptr, zero_ptr, offset + n, ZERO)
            high_up = load_scale_and_zero(scale_ptr, zero_ptr, offset + n + ROWS, ZERO)
            loaded = loaded + low_up + high_up
    return loaded
