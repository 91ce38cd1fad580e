"""The linears of a fused layer as kernel arguments.

The fields of all linears travel in one flat tuple (`pack_linears` on the host, `unpack_linears` in the kernel), because Triton serializes a
tuple of numbers and pointers for ahead-of-time compilation, but neither a named tuple nor a tuple of tuples.

    linears:  x of out_proj, x of gate_up, x of down, x of qkv, norm of out_proj, norm of gate_up, …       field × count + linear
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.pipeline import BLOCK_ROW_BYTES
from stoker.kernels.types import FusedLinear


class LinearArgs(NamedTuple):
    """One linear: y = activation(norm(x) × weightᵀ × scale + bias) + residual. Absent tensors are passed as x, and never read.

    Fields hold tensors and numbers on the host, and the kernel's arguments in the kernel.
    """

    x_ptr: Any  # 16 bits [tokens, k]; of the large-batch kernel's later linears the operand [k × tokens] of `ptx.wgmma`
    norm_ptr: Any  # [k]: the weight of the RMS norm of x (gate_up and qkv)
    norm_eps: Any
    weight_ptr: Any  # [n, row bytes], [2n, row bytes] when gated: the n gate rows, then the n rows that they gate
    scale_ptr: Any  # float32 [rows] (fp8, int8), or 16 bits [groups, rows] (int4)
    zero_ptr: Any  # int4: uint8 or 16 bits [groups, rows]
    bias_ptr: Any  # [rows]
    residual_ptr: Any  # [tokens, n] (out_proj and down)
    out_ptr: Any  # [tokens, n]
    n: Any  # output features
    k: Any  # input features
    stride_row: Any  # bytes from a row of the weight to the next
    row_blocks: Any  # blocks of 128 bytes in a row of the weight


def linear_args(linear: FusedLinear, x: Tensor, k: int, residual: Tensor | None, out: Tensor | None) -> LinearArgs:
    """The kernel arguments of one linear with `k` input features. Absent tensors are replaced by x."""
    weight, fusion = linear.weight, linear.fusion
    assert weight is not None
    optional = fusion.norm_weight, weight.scale, weight.zero, weight.bias, residual, out
    norm, scale, zero, bias, added, result = (x if tensor is None else tensor for tensor in optional)
    stored = weight.values
    return LinearArgs(
        x_ptr=x,
        norm_ptr=norm,
        norm_eps=fusion.norm_eps,
        weight_ptr=stored,
        scale_ptr=scale,
        zero_ptr=zero,
        bias_ptr=bias,
        residual_ptr=added,
        out_ptr=result,
        n=linear.outputs,
        k=k,
        stride_row=stored.stride(0) * stored.element_size(),
        row_blocks=weight.row_bytes // BLOCK_ROW_BYTES.value,
    )


def pack_linears(linears: Iterable[LinearArgs]) -> tuple[Any, ...]:
    """The flat tuple of the kernel argument `linears`: the first field of all linears, then the second one of all, and so on."""
    return tuple(chain.from_iterable(zip(*linears, strict=True)))


def pack_numbers(numbers: Iterable[int]) -> str:
    """Compile-time numbers, one per linear, as a string, because Triton cannot serialize a constant that is a tuple."""
    return " ".join(str(int(number)) for number in numbers)


@triton.constexpr_function
def unpack_numbers(text):
    """The tuple of integers in a string of `pack_numbers`. Constexpr."""
    return tuple(int(number) for number in text.split())


@gluon.jit
def unpack_linear(packed, INDEX: gl.constexpr, COUNT: gl.constexpr):
    """The `LinearArgs` of linear number INDEX in a tuple of `pack_linears` with COUNT linears."""
    return LinearArgs(
        x_ptr=packed[INDEX],
        norm_ptr=packed[COUNT + INDEX],
        norm_eps=packed[2 * COUNT + INDEX],
        weight_ptr=packed[3 * COUNT + INDEX],
        scale_ptr=packed[4 * COUNT + INDEX],
        zero_ptr=packed[5 * COUNT + INDEX],
        bias_ptr=packed[6 * COUNT + INDEX],
        residual_ptr=packed[7 * COUNT + INDEX],
        out_ptr=packed[8 * COUNT + INDEX],
        n=packed[9 * COUNT + INDEX],
        k=packed[10 * COUNT + INDEX],
        stride_row=packed[11 * COUNT + INDEX],
        row_blocks=packed[12 * COUNT + INDEX],
    )


@gluon.jit
def unpack_linears(packed, COUNT: gl.constexpr):
    """A tuple of COUNT (3 or 4) `LinearArgs` from a tuple of `pack_linears`."""
    linears = (
        unpack_linear(packed, 0, COUNT),
        unpack_linear(packed, 1, COUNT),
        unpack_linear(packed, 2, COUNT),
        unpack_linear(packed, COUNT - 1, COUNT),
    )
    return linears[0:COUNT]


@gluon.jit
def select_field(linears, index, FIELD: gl.constexpr, DTYPE: gl.constexpr, COUNT: gl.constexpr):
    """Field number FIELD (`field_number`) of the linear with run-time index `index`, converted to DTYPE."""
    value = gl.to_tensor(linears[0][FIELD]).to(DTYPE)
    for i in gl.static_range(1, COUNT):
        value = gl.where(index == i, gl.to_tensor(linears[i][FIELD]).to(DTYPE), value)
    return value


@triton.constexpr_function
def field_number(name):
    """The index of the field `name` in `LinearArgs`. Constexpr."""
    fields = LinearArgs._fields
    return fields.index(name)


@gluon.jit
def select_number(numbers, index, COUNT: gl.constexpr):
    """The number at run-time index `index` of a tuple of COUNT compile-time numbers."""
    value = gl.to_tensor(numbers[0])
    for i in gl.static_range(1, COUNT):
        value = gl.where(index == i, numbers[i], value)
    return value
