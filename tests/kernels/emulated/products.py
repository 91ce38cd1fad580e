"""Matrix instructions of a warp (mma) and of a warpgroup (wgmma). PTX ISA 8.7, "Warp Level Matrix Instructions" and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from emulated.operands import Mask, Step, read, write
from emulated.parse import Instruction
from emulated.transfers import queued

if TYPE_CHECKING:
    from emulated.program import Program

Register = NDArray[Any]  # one element a thread
_LANE = np.arange(32)
_ROW, _TURN = _LANE // 4, _LANE % 4  # the row (or column) and the position along k of a lane's values


def warp_products(one: Instruction, parts: list[str]) -> Step | None:
    if parts[:2] != ["mma", "sync"]:
        return None
    to, *operands = one.operands
    into, left, right, _ = parts[-4:]
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "s8": torch.int8, "u8": torch.uint8}
    a, b, c = ([read(part, kind) for part in operand] for operand, kind in zip(operands, ("b32", "b32", into), strict=True))  # type: ignore[union-attr]

    def run(program: Program, mask: Mask) -> None:
        sums = multiply(*([part(program) for part in operand] for operand in (a, b, c)), kinds[left], kinds[right])
        for register, values in zip(to, sums, strict=True):  # type: ignore[arg-type]
            write(program, register, values, mask)

    return run


def warpgroup_products(one: Instruction, parts: list[str]) -> Step | None:
    """wgmma with A in registers and B in shared memory, core matrices of 8 columns × 16 bytes without a swizzle."""
    if parts[0] != "wgmma":
        return None
    if parts[1] != "mma_async":
        return queued(one, parts, lambda program: program.products) or (lambda program, mask: None)
    to, rows, descriptor, adds, *negated = one.operands
    assert parts[-3:] == ["f32", "bf16", "bf16"] and negated == [1, 1, 0], one.text
    assert isinstance(to, tuple) and isinstance(rows, tuple)
    columns = 2 * len(to)
    sums, left = [read(part, "f32") for part in to], [read(part, "b32") for part in rows]
    where, is_added = read(descriptor, "u64"), read(adds, "pred")

    def run(program: Program, mask: Mask) -> None:
        described, added = where(program).copy(), is_added(program).copy()

        def arrive(threads: NDArray[np.int64]) -> None:
            assert len(threads) == 32, "all lanes of a warp multiply"
            descriptor, adds_to = int(described[threads[0]]), added[threads[0]]
            assert descriptor >> 62 == 0, "a swizzle"
            start, along, across = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
            column, half = np.arange(columns)[:, None], np.arange(2)
            places = start + column // 8 * across + column % 8 * 16 + half * along
            program.shared.history.async_load(program.clock, int(threads[0]), places.ravel(), 16)
            right = _real(program.shared.load(places.ravel(), 16).view(np.int32), torch.bfloat16).reshape(columns, 16)
            features = np.zeros((16, 16))  # A [row, k]
            for i, part in enumerate(left):  # read only now: until the group is waited for, the registers must not change
                row, k = _ROW[:, None] + 8 * (i % 2), 2 * _TURN[:, None] + np.arange(2) + 8 * (i // 2)
                features[row, k] = _elements(part(program)[threads], torch.bfloat16, 1, 2)[0]
            product = features @ right.T
            for i, part in enumerate(sums):
                whole = part(program).copy()
                values = product[_ROW + 8 * (i % 4 // 2), i // 4 * 8 + 2 * _TURN + i % 2]
                whole[threads] = (whole[threads] + values if adds_to else values).astype(np.float32)
                write(program, to[i], whole, None)

        program.products.issue(mask, arrive)

    return run


def multiply(a: Sequence[Register], b: Sequence[Register], c: Sequence[Register], left: torch.dtype, right: torch.dtype) -> list[Register]:
    """c + a × b of each warp: four registers of the 16 rows (of type `left`), two of the 8 columns (`right`), four of sums."""
    each = 4 // left.itemsize
    depth, half = 8 * each, 4 * each
    warps = len(c[0]) // 32
    rows, columns = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    along = _TURN[:, None] * each + np.arange(each)
    for i, register in enumerate(a):
        rows[:, (_ROW + 8 * (i % 2))[:, None], along + half * (i // 2)] = _elements(register, left, warps, each)
    for i, register in enumerate(b):
        columns[:, along + half * i, _ROW[:, None]] = _elements(register, right, warps, each)
    product = rows @ columns
    return [part + product[:, _ROW + 8 * (i // 2), 2 * _TURN + i % 2].ravel().astype(part.dtype) for i, part in enumerate(c)]


def _elements(register: Register, dtype: torch.dtype, warps: int, each: int) -> Register:
    return _real(register.view(np.int32), dtype).reshape(warps, 32, each)


def _real(words: Register, dtype: torch.dtype) -> Register:
    """float64 of the packed values of int32 words, in the order of memory."""
    return torch.from_numpy(words.copy()).view(dtype).double().numpy()
