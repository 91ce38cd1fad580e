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
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def read(operand: Operand, kind: str) -> Read:
    """A function that returns the operand's values, one per thread or one for all, as PTX type `kind` (a key of `TYPES`)."""
    dtype = TYPES[kind]
    if isinstance(operand, Register):
        index, stored = operand.index, UNSIGNED[operand.width]
        if np.dtype(stored).itemsize == np.dtype(dtype).itemsize:
            return lambda program: program.registers[index].view(dtype)
        same = np.dtype(f"u{np.dtype(dtype).itemsize}")
        return lambda program: program.registers[index].astype(same).view(dtype)
    if isinstance(operand, int):
        size = np.dtype(dtype).itemsize
        constant = np.bool_(operand) if kind == "pred" else np.array([operand & ((1 << 8 * size) - 1)], f"u{size}").view(dtype)
        return lambda program: constant  # type: ignore[return-value]
    assert isinstance(operand, str), operand
    name = operand
    return lambda program: program.special(name).astype(dtype)


def write(program: Program, target: Operand, values: Values, mask: Mask) -> None:
    """Write `values` to a register, in the threads of `mask` (None: all). The bit bucket "_" discards them."""
    if target == "_":
        return
    assert isinstance(target, Register), target
    if values.dtype.kind == "f":
        values = values.view(f"u{values.dtype.itemsize}")
    stored_values = values.astype(UNSIGNED[target.width], copy=False)
    if stored_values.shape != program.thread.shape:
        stored_values = np.broadcast_to(stored_values, program.num_threads)
    program.registers[target.index] = stored_values if mask is None else np.where(mask, stored_values, program.registers[target.index])


def addresses_of(place: Address, kind: str) -> Read:
    """A function that returns each thread's address as int64. kind: the PTX type of the base, "u32" (shared memory) or "u64"."""
    base = read(place.base, kind)
    return lambda program: np.broadcast_to(base(program), program.num_threads).astype(np.int64) + place.offset
