"""What an instruction reads and writes of a program: registers, numbers and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulated.arithmetic import TYPES, Values
from emulated.parse import Operand, Place, Register

if TYPE_CHECKING:
    from emulated.program import Program

Mask = NDArray[np.bool_] | None
Step = Callable[["Program", Mask], None]
Read = Callable[["Program"], Values]
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def read(operand: Operand, kind: str) -> Read:
    """The values of an operand, as numbers of a type."""
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


def write(program: Program, to: Operand, values: Values, mask: Mask) -> None:
    if to == "_":
        return
    assert isinstance(to, Register), to
    if values.dtype.kind == "f":
        values = values.view(f"u{values.dtype.itemsize}")
    made = values.astype(UNSIGNED[to.width], copy=False)
    if made.shape != program.thread.shape:
        made = np.broadcast_to(made, program.num_threads)
    program.registers[to.index] = made if mask is None else np.where(mask, made, program.registers[to.index])


def addresses_of(place: Place, kind: str) -> Read:
    base = read(place.base, kind)
    return lambda program: np.broadcast_to(base(program), program.num_threads).astype(np.int64) + place.offset
