"""The arithmetic of PTX instructions on arrays with one element per thread (PTX ISA 8.7, from "Integer Arithmetic Instructions" on)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[Any]
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "e4m3x2": np.uint16,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
}


def _divide(a: Values, b: Values) -> Values:
    """a / b. Integers are truncated toward zero; a zero divisor, whose result PTX leaves unspecified, counts as 1."""
    if a.dtype.kind == "f":
        return a / b
    wide, by = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return (np.abs(wide) // np.abs(by) * np.sign(wide) * np.sign(by)).astype(a.dtype)


def _remainder(a: Values, b: Values) -> Values:
    return (a - _divide(a, b) * b).astype(a.dtype)


def _shift(left: bool) -> Callable[[Values, Values], Values]:
    """shl or shr. Shifts by the width or more give zeros, or copies of the sign."""

    def shifted(a: Values, by: Values) -> Values:
        bits = 8 * a.dtype.itemsize
        amount = np.minimum(by.view(np.uint32) if by.dtype != np.uint32 else by, bits - 1).astype(a.dtype)
        result = a << amount if left else a >> amount
        overflow = a.dtype.type(0) if left or a.dtype.kind == "u" else a >> a.dtype.type(bits - 1)
        return np.where(by.astype(np.uint32) >= bits, overflow, result)

    return shifted


def _multiply_add(a: Values, b: Values, c: Values) -> Values:
    """a × b + c. Floats are computed in float64 and rounded once more, which differs from a true FMA only for ties of float32."""
    if a.dtype.kind == "f":
        return (a.astype(np.float64) * b + c).astype(a.dtype)
    return a * b + c


ARITHMETIC: dict[str, Callable[..., Values]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": _remainder,
    "mad": _multiply_add,
    "fma": _multiply_add,
    "min": lambda a, b: np.fmin(a, b),
    "max": lambda a, b: np.fmax(a, b),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": np.abs,
    "shl": _shift(True),
    "shr": _shift(False),
    "mov": lambda a: a,
    "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype),
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(a.dtype),
    "tanh": np.tanh,
}

COMPARES: dict[str, Callable[[Values, Values], Values]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~_is_unordered(a, b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | _is_unordered(a, b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_is_unordered(a, b),
    "nan": lambda a, b: _is_unordered(a, b),
}


def _is_unordered(a: Values, b: Values) -> Values:
    return (a != a) | (b != b)


def unsigned_bit_field(a: Values, start: Values, count: Values) -> Values:
    """bfe.u32: `count` bits of a from bit `start` on."""
    return (a >> start.astype(np.uint32)) & ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)


def signed_bit_field(a: Values, start: Values, count: Values) -> Values:
    """bfe.s32: like `unsigned_bit_field`, with the highest bit of the field as its sign."""
    left = (np.uint32(32) - start.astype(np.uint32) - count.astype(np.uint32)).astype(np.uint32)
    return ((a << left).view(np.int32) >> (np.uint32(32) - count.astype(np.uint32)).astype(np.int32)).view(np.uint32)


def permute_bytes(a: Values, b: Values, selector: Values) -> Values:
    """prmt.b32: each nibble of `selector` selects one of the eight bytes of b:a or, with its bit 3 set, copies of its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for i in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


def apply_logic_table(a: Values, b: Values, c: Values, table: int) -> Values:
    """lop3.b32: the bitwise function of a, b and c whose truth table is `table`; a is the highest bit of its index."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def unpack_16bit(words: Values, kind: torch.dtype) -> Values:
    """The two 16-bit floats of each thread's register, as float32 [2, threads]; the low half first."""
    return _tensor(words.astype(np.uint32).view(np.uint16).view(np.int16)).view(kind).float().numpy().reshape(-1, 2).T


def pack_16bit(low: Values, high: Values, kind: torch.dtype) -> Values:
    """Two float32 per thread, rounded to 16-bit floats and packed into one register."""
    packed = torch.stack([_tensor(np.atleast_1d(low)), _tensor(np.atleast_1d(high))], 1).to(kind)
    return packed.view(torch.int16).numpy().view(np.uint16).copy().view(np.uint32).ravel()


def integer_to_float32(values: Values) -> Values:
    """The integers as float32. Raises NotImplementedError for one that float32 does not represent, since it would be rounded twice."""
    result = values.astype(np.float32)
    if (result.astype(np.float64) != values).any():
        raise NotImplementedError("a conversion of an integer above 2^24 to a 16-bit float")
    return result


def round_to_16bit(values: Values, kind: torch.dtype) -> Values:
    """The bits of `values`, rounded to a 16-bit float type. `values` are float32."""
    return _tensor(np.atleast_1d(values)).to(kind).view(torch.int16).numpy().view(np.uint16)


def pack_e4m3(low: Values, high: Values) -> Values:
    """Two float32 per thread, rounded to e4m3 and packed into 16 bits. Larger magnitudes than 448 saturate; NaN stays NaN."""
    both = torch.stack([_tensor(np.atleast_1d(low)), _tensor(np.atleast_1d(high))], 1)
    rounded = torch.where(both.isnan(), both, both.clamp(-448, 448)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy().copy().view(np.uint16).ravel()


def unpack_e4m3(words: Values) -> Values:
    """The two e4m3 numbers of each thread's 16 bits, as float32 [2, threads]; the low byte first."""
    return torch.from_numpy(words.astype(np.uint16).view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy().reshape(-1, 2).T


def _tensor(values: Values) -> torch.Tensor:
    return torch.from_numpy(np.array(values))
