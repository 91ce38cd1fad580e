"""What instructions compute, on arrays of one element a thread. PTX ISA 8.7, "Integer Arithmetic Instructions" and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[Any]
TYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "f16x2": np.uint32,
    "bf16x2": np.uint32, "e4m3x2": np.uint16, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip


def _divide(a: Values, b: Values) -> Values:
    if a.dtype.kind == "f":
        return a / b
    wide, by = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return (np.abs(wide) // np.abs(by) * np.sign(wide) * np.sign(by)).astype(a.dtype)


def _remainder(a: Values, b: Values) -> Values:
    return (a - _divide(a, b) * b).astype(a.dtype)


def _shift(left: bool) -> Callable[[Values, Values], Values]:
    def shifted(a: Values, by: Values) -> Values:
        bits = 8 * a.dtype.itemsize
        amount = np.minimum(by.view(np.uint32) if by.dtype != np.uint32 else by, bits - 1).astype(a.dtype)
        made = a << amount if left else a >> amount
        return np.where(by.astype(np.uint32) >= bits, a.dtype.type(0) if left or a.dtype.kind == "u" else a >> a.dtype.type(bits - 1), made)

    return shifted


def _multiply_add(a: Values, b: Values, c: Values) -> Values:
    """Rounded once, but for the rare result that float64 rounds onto a tie of float32."""
    if a.dtype.kind == "f":
        return (a.astype(np.float64) * b + c).astype(a.dtype)
    return a * b + c


PLAIN: dict[str, Callable[..., Values]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": _divide, "rem": _remainder,
    "mad": _multiply_add, "fma": _multiply_add, "min": lambda a, b: np.fmin(a, b), "max": lambda a, b: np.fmax(a, b),
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a, "neg": lambda a: -a,
    "abs": np.abs, "shl": _shift(True), "shr": _shift(False), "mov": lambda a: a, "sqrt": np.sqrt, "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype), "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(a.dtype), "tanh": np.tanh,
}  # fmt: skip

COMPARES: dict[str, Callable[[Values, Values], Values]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) & ~_unordered(a, b), "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "equ": lambda a, b: (a == b) | _unordered(a, b), "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_unordered(a, b), "nan": lambda a, b: _unordered(a, b),
}  # fmt: skip


def _unordered(a: Values, b: Values) -> Values:
    return (a != a) | (b != b)


def bits_of_field(a: Values, start: Values, count: Values) -> Values:
    """bfe.u32"""
    return (a >> start.astype(np.uint32)) & ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)


def signed_field(a: Values, start: Values, count: Values) -> Values:
    """bfe.s32: the field's highest bit is its sign."""
    left = (np.uint32(32) - start.astype(np.uint32) - count.astype(np.uint32)).astype(np.uint32)
    return ((a << left).view(np.int32) >> (np.uint32(32) - count.astype(np.uint32)).astype(np.int32)).view(np.uint32)


def permuted(a: Values, b: Values, selector: Values) -> Values:
    """prmt.b32: each nibble of `selector` names one of eight bytes, or the sign of one."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    made = np.zeros_like(both)
    for i in range(4):
        chosen = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        made |= np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return made.astype(np.uint32)


def looked_up(a: Values, b: Values, c: Values, table: int) -> Values:
    """lop3.b32"""
    made = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            made = made | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return made


def widened_halves(words: Values, kind: torch.dtype) -> Values:
    """float32 [2, threads] of two 16-bit numbers a thread, the lower first."""
    return _torch(words.astype(np.uint32).view(np.uint16).view(np.int16)).view(kind).float().numpy().reshape(-1, 2).T


def halves(low: Values, high: Values, kind: torch.dtype) -> Values:
    """Two float32 a thread as 16-bit numbers of one register."""
    made = torch.stack([_torch(np.atleast_1d(low)), _torch(np.atleast_1d(high))], 1).to(kind)
    return made.view(torch.int16).numpy().view(np.uint16).copy().view(np.uint32).ravel()


def narrowed(values: Values, kind: torch.dtype) -> Values:
    """The bits of float32 numbers as 16-bit ones."""
    return _torch(np.atleast_1d(values)).to(kind).view(torch.int16).numpy().view(np.uint16)


def codes(low: Values, high: Values) -> Values:
    """Two float32 a thread as e4m3 of 16 bits, the largest for what is larger."""
    both = torch.stack([_torch(np.atleast_1d(low)), _torch(np.atleast_1d(high))], 1)
    made = torch.where(both.isnan(), both, both.clamp(-448, 448)).to(torch.float8_e4m3fn)
    return made.view(torch.uint8).numpy().copy().view(np.uint16).ravel()


def decoded(words: Values) -> Values:
    """float32 [2, threads] of two e4m3 codes a thread."""
    return torch.from_numpy(words.astype(np.uint16).view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy().reshape(-1, 2).T


def _torch(values: Values) -> torch.Tensor:
    return torch.from_numpy(np.array(values))
