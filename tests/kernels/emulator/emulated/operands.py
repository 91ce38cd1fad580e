"""Access to the operands of an instruction: registers, constants, special registers and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulated.arithmetic import TYPES, Values
from emulated.parse import Address, Operand, Register

if TYPE_CHECKING:
    from emulated.program import Program

Mask = NDArray[np.bool_] | None
Step = Callable[["Program", Mask], None]
Read = Callable[["Program"], Values]
# The type of a register, by its width.
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.bool_), **{bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}}


def read(operand: Operand, kind: str) -> Read:
    """A function that returns the operand's values, one per thread or one for all, as PTX type `kind` (a key of `TYPES`)."""
    dtype = np.dtype(TYPES[kind])
    if isinstance(operand, Register):
        index, stored = operand.index, UNSIGNED[operand.width]
        if stored == dtype:
            return lambda program: program.registers[index]
        if stored.itemsize == dtype.itemsize:
            return lambda program: program.registers[index].view(dtype)
        same = np.dtype(f"u{dtype.itemsize}")
        return lambda program: program.registers[index].astype(same).view(dtype)
    if isinstance(operand, int):
        size = dtype.itemsize
        constant = np.bool_(operand) if kind == "pred" else np.array([operand & ((1 << 8 * size) - 1)], f"u{size}").view(dtype)
        return lambda program: constant  # type: ignore[return-value]
    assert isinstance(operand, str), operand
    name = operand
    return lambda program: program.special(name).astype(dtype)


def write(program: Program, target: Operand, values: Values, mask: Mask) -> None:
    """Write `values` to a register, in the threads of `mask` (None: all). The bit bucket "_" discards them."""
    if not isinstance(target, Register):
        assert target == "_", target
        return
    stored = UNSIGNED[target.width]
    if values.dtype != stored:
        is_same_size = values.dtype.itemsize == stored.itemsize and values.dtype.kind != "b" and target.width > 1
        if values.dtype.kind == "f" and not is_same_size:
            values = values.view(f"u{values.dtype.itemsize}")
        values = values.view(stored) if is_same_size else values.astype(stored)
    if mask is not None:
        values = np.where(mask, values, program.registers[target.index])
    elif values.shape != program.thread.shape:
        values = np.broadcast_to(values, program.num_threads)
    program.registers[target.index] = values


def addresses_of(place: Address, kind: str) -> Read:
    """A function that returns each thread's address as int64. kind: the PTX type of the base, "u32" (shared memory) or "u64"."""
    base = read(place.base, kind)

    def addresses(program: Program) -> Values:
        places = base(program).astype(np.int64) + place.offset
        return places if len(places) == program.num_threads else np.broadcast_to(places, program.num_threads)

    return addresses
