"""Matrix instructions of a warp (mma) and of a warpgroup (wgmma); PTX ISA 8.7, from "Warp Level Matrix Instructions" on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from emulated.operands import Mask, Step, read, write
from emulated.parse import Instruction
from emulated.transfers import group_operations

if TYPE_CHECKING:
    from emulated.program import Program

Register = NDArray[Any]  # one element per thread
_LANE = np.arange(32)
_ROW, _COLUMN_GROUP = _LANE // 4, _LANE % 4  # of a lane's fragment: its row (or column), and its group of columns (or of k)


def warp_products(instruction: Instruction, parts: list[str]) -> Step | None:
    if parts[:2] != ["mma", "sync"]:
        return None
    targets, *operands = instruction.operands
    into, left, right, _ = parts[-4:]
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "s8": torch.int8, "u8": torch.uint8}
    a, b, c = ([read(part, kind) for part in operand] for operand, kind in zip(operands, ("b32", "b32", into), strict=True))  # type: ignore[union-attr]

    def run(program: Program, mask: Mask) -> None:
        sums = multiply_accumulate(*([part(program) for part in operand] for operand in (a, b, c)), kinds[left], kinds[right])
        for register, values in zip(targets, sums, strict=True):  # type: ignore[arg-type]
            write(program, register, values, mask)

    return run


def warpgroup_products(instruction: Instruction, parts: list[str]) -> Step | None:
    """wgmma with A in registers and B in shared memory, in core matrices of 8 columns × 16 bytes without a swizzle."""
    if parts[0] != "wgmma":
        return None
    if parts[1] != "mma_async":
        return group_operations(instruction, parts, lambda program: program.products) or (lambda program, mask: None)
    targets, rows, descriptor, adds, *negated = instruction.operands
    assert parts[-3:] == ["f32", "bf16", "bf16"] and negated == [1, 1, 0], instruction.text
    assert isinstance(targets, tuple) and isinstance(rows, tuple)
    columns = 2 * len(targets)
    sums, left = [read(part, "f32") for part in targets], [read(part, "b32") for part in rows]
    descriptor_of, is_added = read(descriptor, "u64"), read(adds, "pred")

    def run(program: Program, mask: Mask) -> None:
        described, added = descriptor_of(program).copy(), is_added(program).copy()

        def arrive(threads: NDArray[np.int64]) -> None:
            assert len(threads) == 32, "all lanes of a warp multiply"
            descriptor, adds_to = int(described[threads[0]]), added[threads[0]]
            assert descriptor >> 62 == 0, "a swizzle"
            start, along, across = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
            column, half = np.arange(columns)[:, None], np.arange(2)
            places = start + column // 8 * across + column % 8 * 16 + half * along
            program.shared.history.async_load(program.clock, int(threads[0]), places.ravel(), 16)
            right = _as_float64(program.shared.load(places.ravel(), 16).view(np.int32), torch.bfloat16).reshape(columns, 16)
            features = np.zeros((16, 16))  # A [row, k]
            for i, part in enumerate(left):  # read when the group completes, because the registers must not change before
                row, k = _ROW[:, None] + 8 * (i % 2), 2 * _COLUMN_GROUP[:, None] + np.arange(2) + 8 * (i // 2)
                features[row, k] = _elements(part(program)[threads], torch.bfloat16, 1, 2)[0]
            product = features @ right.T
            for i, part in enumerate(sums):
                whole = part(program).copy()
                values = product[_ROW + 8 * (i % 4 // 2), i // 4 * 8 + 2 * _COLUMN_GROUP + i % 2]
                whole[threads] = (whole[threads] + values if adds_to else values).astype(np.float32)
                write(program, targets[i], whole, None)

        program.products.issue(mask, arrive)

    return run


def multiply_accumulate(
    a: Sequence[Register], b: Sequence[Register], c: Sequence[Register], left: torch.dtype, right: torch.dtype
) -> list[Register]:
    """c + a × b per warp. a: four registers, 16 rows of type `left`; b: two registers, 8 columns of type `right`; c: four registers."""
    per_register = 4 // left.itemsize
    depth, half = 8 * per_register, 4 * per_register
    warps = len(c[0]) // 32
    rows, columns = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    along = _COLUMN_GROUP[:, None] * per_register + np.arange(per_register)
    for i, register in enumerate(a):
        rows[:, (_ROW + 8 * (i % 2))[:, None], along + half * (i // 2)] = _elements(register, left, warps, per_register)
    for i, register in enumerate(b):
        columns[:, along + half * i, _ROW[:, None]] = _elements(register, right, warps, per_register)
    product = rows @ columns
    return [part + product[:, _ROW + 8 * (i // 2), 2 * _COLUMN_GROUP + i % 2].ravel().astype(part.dtype) for i, part in enumerate(c)]


def _elements(register: Register, dtype: torch.dtype, warps: int, per_register: int) -> Register:
    return _as_float64(register.view(np.int32), dtype).reshape(warps, 32, per_register)


def _as_float64(words: Register, dtype: torch.dtype) -> Register:
    """The values of type `dtype` that are packed in int32 words, as float64 in the order of memory."""
    return torch.from_numpy(words.copy()).view(dtype).double().numpy()
