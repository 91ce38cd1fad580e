"""A warp's number as a scalar, conversions of single registers, and sums over lanes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.registers import ptx


@gluon.jit
def warp_index():
    """The warp's number as a scalar, so that a branch on it is a branch of whole warps."""
    return gl.inline_asm_elementwise(_WARP_INDEX, "=&r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def bf16_twice(value):
    """A 32-bit register with `value` (float32), rounded to bfloat16, in both halves."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [value], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def sum_over_fragment_rows(value):
    """The sum of `value` over the eight lanes with the same l % 4, that is over the rows of an accumulator fragment."""
    return gl.inline_asm_elementwise(_SUM_OVER_FRAGMENT_ROWS, "=&f,f", [value], dtype=gl.float32, is_pure=False, pack=1)


_WARP_INDEX = ptx(
    "mov.u32 $0, %tid.x;",
    "shr.u32 $0, $0, 5;",
    "add.s32 $0, $0, $1;",
    "shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;",  # lane 0's value: the assembler then knows that it is uniform
)

_SUM_OVER_FRAGMENT_ROWS = ptx(
    "{ .reg .f32 t;",
    "shfl.sync.bfly.b32 t, $1, 4, 31, 0xffffffff;",
    "add.f32 $0, $1, t;",
    "shfl.sync.bfly.b32 t, $0, 8, 31, 0xffffffff;",
    "add.f32 $0, $0, t;",
    "shfl.sync.bfly.b32 t, $0, 16, 31, 0xffffffff;",
    "add.f32 $0, $0, t; }",
)
