"""Matrix instructions of a warp (mma) and of a warpgroup (wgmma); PTX ISA 8.7, from "Warp Level Matrix Instructions" on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from emulated.arithmetic import TYPES
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
    """wgmma of values of 16 bits, e4m3 or int8, k of which are 32 bytes. A [64, k] is in registers or shared memory, B [k, columns] in
    shared memory.

    Sums are exact. On a device, those of e4m3 products have about 14 bits.
    """
    if parts[0] != "wgmma":
        return None
    if parts[1] != "mma_async":
        return group_operations(instruction, parts, lambda program: program.products) or (lambda program, mask: None)
    targets, rows, descriptor, adds, *options = instruction.operands
    kind = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "s8": torch.int8}[parts[-1]]
    is_in_registers = isinstance(rows, tuple)
    is_byte = kind.itemsize == 1  # of which neither operand is transposed
    is_transposed = not is_byte and options[-1] == 1  # B is stored as [16, columns], not as [columns, 16]
    sum_type = "s32" if kind == torch.int8 else "f32"
    assert parts[-3] == sum_type and parts[-2] == parts[-1], instruction.text
    if kind == torch.int8:
        assert not options, instruction.text
    else:
        num_options = 2 if is_byte else 3 if is_in_registers else 4
        assert options[:2] == [1, 1] and len(options) == num_options, instruction.text
        assert is_in_registers or is_byte or options[2] == 0, instruction.text
    assert isinstance(targets, tuple) and not (is_byte and is_in_registers)
    columns = 2 * len(targets)
    sums = [read(part, sum_type) for part in targets]
    left = [read(part, "b32") for part in rows] if is_in_registers else []  # type: ignore[union-attr]
    left_descriptor = None if is_in_registers else read(rows, "u64")
    parts_of_sums = np.arange(len(targets))[:, None]
    rows_of_sums, columns_of_sums = _ROW + 8 * (parts_of_sums % 4 // 2), parts_of_sums // 4 * 8 + 2 * _COLUMN_GROUP + parts_of_sums % 2
    descriptor_of, is_added = read(descriptor, "u64"), read(adds, "pred")

    def run(program: Program, mask: Mask) -> None:
        described, added = descriptor_of(program).copy(), np.broadcast_to(is_added(program), program.num_threads).copy()
        left_described = None if left_descriptor is None else left_descriptor(program).copy()

        def load(places: NDArray[np.int64], thread: int) -> Register:
            """The float64 values of units of 16 contiguous bytes at `places` [rows, units], as [rows, values]."""
            program.shared.history.async_load(program.clock, thread, places.ravel(), 16)
            return _as_float64(program.shared.load(places.ravel(), 16).view(np.int32), kind).reshape(len(places), -1)

        def arrive(threads: NDArray[np.int64]) -> None:
            assert len(threads) == 32, "all lanes of a warp multiply"
            first = int(threads[0])
            if is_transposed:  # units of 8 columns for each k
                right = load(_matrix_units(int(described[first]), np.arange(16), np.arange(columns // 8), True), first).T
            else:
                right = load(_matrix_units(int(described[first]), np.arange(columns), np.arange(2), False), first)
            if left_described is not None:
                features = load(_matrix_units(int(left_described[first]), first // 32 % 4 * 16 + np.arange(16), np.arange(2), False), first)
            else:
                features = np.zeros((16, 16))  # A [row, k]
            lanes = slice(first, first + 32)
            for i, part in enumerate(left):  # read when the group completes, because the registers must not change before
                row, k = _ROW[:, None] + 8 * (i % 2), 2 * _COLUMN_GROUP[:, None] + np.arange(2) + 8 * (i // 2)
                features[row, k] = _elements(np.ascontiguousarray(part(program)[lanes]), kind, 1, 2)[0]
            product = (features @ right.T)[rows_of_sums, columns_of_sums]  # [registers, lanes]
            if added[first]:
                product += [part(program)[lanes] for part in sums]
            for register, values in zip(targets, product.astype(TYPES[sum_type]).view(np.uint32), strict=True):
                program.registers[register.index] = whole = program.registers[register.index].copy()
                whole[lanes] = values

        program.products.issue(mask, arrive)

    return run


def _matrix_units(descriptor: int, rows: NDArray[np.int64], units: NDArray[np.int64], is_transposed: bool) -> NDArray[np.int64]:
    """The addresses [rows, units] of units of 16 contiguous bytes of a matrix in shared memory.

    Without a swizzle, 8 rows × 16 bytes are contiguous; units are `along` apart, and groups of 8 rows `across`. With the swizzle of 128
    bytes, 8 rows × 128 bytes are contiguous, and the place of a unit in its row is xored with the number of the row; with that of 64
    bytes, with half the number of the row in 8 rows × 64 bytes. Groups of 8 rows are `across` apart. A transposed matrix has rows of k;
    each 64 of its columns are `along` apart.
    """
    start, along, across = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
    groups = rows[:, None] // 8 * across
    swizzle = descriptor >> 62
    if swizzle == 0:
        assert not is_transposed
        return start + groups + rows[:, None] % 8 * 16 + units * along
    if swizzle == 2:
        assert not is_transposed
        places = start + groups + rows[:, None] % 8 * 64 + units * 16
        return places ^ (places >> 7 & 3) << 4
    assert swizzle == 1, "a swizzle of 32 bytes"
    places = start + groups + rows[:, None] % 8 * 128 + (units // 8 * along + units % 8 * 16 if is_transposed else units * 16)
    return places ^ (places >> 7 & 7) << 4


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
