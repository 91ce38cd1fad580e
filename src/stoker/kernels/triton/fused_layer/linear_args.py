"""The linears of a fused layer as kernel arguments."""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A linear is a tuple, since Triton's language has no structs: these are its fields, as kernels list them.
X, NORM, EPS, WEIGHT, SCALES, ZEROS, BIAS, RESIDUAL, OUT, N, K, STRIDE, LENGTH = map(tl.constexpr, range(13))


@triton.constexpr_function
def listed(numbers):
    return tuple(int(number) for number in numbers.split())


@gluon.jit
def linked(fields, COUNT: gl.constexpr):
    """COUNT linears, of parallel tuples."""
    links = ()
    for i in gl.static_range(COUNT):
        link = ()
        for field in gl.static_range(len(fields)):
            link = link + (fields[field][i],)
        links = links + (link,)
    return links


@gluon.jit
def chosen(links, linear, FIELD: gl.constexpr, AS: gl.constexpr, COUNT: gl.constexpr):
    """A field of the linear of that number."""
    value = gl.to_tensor(links[0][FIELD]).to(AS)
    for i in gl.static_range(1, COUNT):
        value = gl.where(linear == i, gl.to_tensor(links[i][FIELD]).to(AS), value)
    return value


@gluon.jit
def number(flags, linear, COUNT: gl.constexpr):
    """A compile-time number of the linear of that number."""
    value = gl.to_tensor(flags[0])
    for i in gl.static_range(1, COUNT):
        value = gl.where(linear == i, flags[i], value)
    return value
