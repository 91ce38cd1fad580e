"""Copies of boxes of two-dimensional tensors between global and shared memory (TMA), and the groups of those that store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulated.operands import Mask, Step, addresses_of, read
from emulated.parse import Address, Instruction, TensorAddress

if TYPE_CHECKING:
    from emulated.program import Program

Addresses = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor [rows, columns] in global memory at `address`, and the box [rows, columns] that one copy moves."""

    address: int
    shape: tuple[int, int]
    row_bytes: int  # from one row to the next
    element_bytes: int
    box: tuple[int, int]
    swizzle: int  # bytes: 0, 32, 64 or 128

    @property
    def num_bytes(self) -> int:
        return self.box[0] * self.box[1] * self.element_bytes

    def units(self, row: int, column: int, shared: int) -> tuple[Addresses, Addresses, NDArray[np.int64]]:
        """(global addresses, shared addresses, bytes inside the tensor) of the 16-byte units of the box at (row, column).

        shared: the address of the box there, in which rows are contiguous and units are swizzled.
        """
        width = self.box[1] * self.element_bytes
        rows, offsets = (each.ravel() for each in np.meshgrid(np.arange(self.box[0]), np.arange(0, width, 16), indexing="ij"))
        begin = column * self.element_bytes + offsets
        inside = np.clip(self.shape[1] * self.element_bytes - begin, 0, 16) * ((row + rows >= 0) & (row + rows < self.shape[0]))
        assert column >= 0 and width <= (self.swizzle or width) and shared % 128 == 0
        places = shared + rows * width + offsets
        swizzled = places ^ (places >> 7 & (self.swizzle // 16 - 1 if self.swizzle else 0)) << 4
        return self.address + (row + rows) * self.row_bytes + begin, swizzled, inside


def tensor_copies(instruction: Instruction, parts: list[str]) -> Step | None:
    """cp.async.bulk.tensor.2d, and commit_group and wait_group of copies in bulk. Other copies in bulk: `transfers.async_copies`."""
    if parts[:3] != ["cp", "async", "bulk"]:
        return None
    if parts[3] == "commit_group":
        return lambda program, mask: program.bulk_stores.commit(mask)
    if parts[3] == "wait_group":
        return lambda program, mask: program.bulk_stores.wait(mask, instruction.operands[0])  # type: ignore[arg-type]
    if parts[3:5] != ["tensor", "2d"]:
        return None
    place = next(operand for operand in instruction.operands if isinstance(operand, TensorAddress))
    near, *barrier = [addresses_of(operand, "u32") for operand in instruction.operands if isinstance(operand, Address)]
    tensor_map, column, row = read(place.base, "u64"), *(read(part, "s32") for part in place.coordinates)

    def box(program: Program, thread: int) -> tuple[TensorMap, tuple[Addresses, Addresses, NDArray[np.int64]]]:
        at, left, top, shared = (
            int(np.broadcast_to(part(program), program.num_threads)[thread]) for part in (tensor_map, column, row, near)
        )
        return program.tensor_maps[at], program.tensor_maps[at].units(top, left, shared)

    def load(program: Program, mask: Mask) -> None:
        for thread in map(int, program.thread if mask is None else np.flatnonzero(mask)):
            moved, (origin, target, inside) = box(program, thread)
            arrivals = program.arrivals[int(barrier[0](program)[thread])]
            program.memory.history.async_load(program.clock, thread, origin[inside > 0], 16)
            program.shared.history.issue_bulk_copy(program.clock, thread, target, 16)
            program.clock.observed[arrivals.number][:] = False

            def arrive(
                origin: Addresses = origin, target: Addresses = target, inside: NDArray[np.int64] = inside, number: int = arrivals.number
            ) -> None:
                values = np.zeros((len(target), 16), np.uint8)
                values[inside > 0] = program.memory.load(origin[inside > 0], 16)
                values[np.arange(16) >= inside[:, None]] = 0
                program.shared.history.store_by_bulk_copy(target, 16, number)
                program.shared.store(target, values)

            arrivals.issue_copy(moved.num_bytes, arrive)

    def store(program: Program, mask: Mask) -> None:
        boxes = {thread: box(program, thread)[1] for thread in map(int, program.thread if mask is None else np.flatnonzero(mask))}

        def leave(threads: NDArray[np.int64]) -> None:
            for thread in map(int, threads):
                target, origin, inside = boxes[thread]
                assert np.isin(inside, (0, 16)).all(), "the end of a row inside 16 bytes"
                target, origin = target[inside > 0], origin[inside > 0]
                program.shared.history.async_load(program.clock, thread, origin, 16)
                program.memory.history.store_by_copy(program.clock, np.full(len(target), thread), target, 16)
                program.memory.store(target, program.shared.load(origin, 16))

        program.bulk_stores.issue(mask, leave)

    return load if barrier else store
