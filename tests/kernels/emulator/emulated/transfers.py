"""Loads and stores, asynchronous copies, and shuffles between the lanes of a warp.

Each public function maps an instruction and the parts of its name to the `Step` that runs it, or to None if it is of another kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulated.arithmetic import TYPES, Values
from emulated.memory import bank_conflicts
from emulated.operands import Mask, Read, Step, addresses_of, read, write
from emulated.parse import Address, Instruction, Operand

if TYPE_CHECKING:
    from emulated.memory import Memory
    from emulated.program import Program


def warp_shuffles(instruction: Instruction, parts: list[str]) -> Step | None:
    """shfl, redux and elect. All lanes of a warp participate."""
    if parts[0] == "elect":  # the first lane
        assert isinstance(instruction.operands[0], tuple)
        target_register, is_elected = instruction.operands[0]

        def elect(program: Program, mask: Mask) -> None:
            write(program, target_register, np.zeros(1, np.uint32), mask)
            write(program, is_elected, program.lane == 0, mask)

        return elect
    if parts[0] == "shfl":
        target_register, source, amount, *_ = instruction.operands
        values, distance = read(source, "b32"), read(amount, "u32")
        moves: dict[str, Callable[..., Values]] = {
            "bfly": lambda lane, by: lane ^ by,
            "idx": lambda lane, by: by,
            "down": lambda lane, by: lane + by,
            "up": lambda lane, by: lane - by,
        }
        move = moves[parts[2]]

        def shuffle(program: Program, mask: Mask) -> None:
            other = np.broadcast_to(move(program.lane, distance(program).astype(np.int64)), program.num_threads)
            inside = (other >= 0) & (other < 32)
            write(program, target_register, values(program)[np.where(inside, program.lane_zero + other, program.thread)], mask)

        return shuffle
    if parts[0] == "redux":
        target_register, source, _ = instruction.operands
        values = read(source, parts[-1])
        join = {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[parts[2]]

        def reduce(program: Program, mask: Mask) -> None:
            write(program, target_register, np.repeat(join(values(program).reshape(-1, 32), axis=1), 32), mask)

        return reduce
    return None


def matrix_loads_and_stores(instruction: Instruction, parts: list[str]) -> Step | None:
    """ldmatrix and stmatrix: eight lanes have the addresses of a matrix's rows (8 × 16 bits); each lane holds two adjacent elements."""
    if parts[0] not in ("ldmatrix", "stmatrix"):
        return None
    place, values_operand = instruction.operands if parts[0] == "stmatrix" else reversed(instruction.operands)
    assert isinstance(place, Address)
    registers = values_operand if isinstance(values_operand, tuple) else (values_operand,)
    at, lane = addresses_of(place, "u32"), np.arange(32)
    along, across = lane // 4, lane % 4 * 2
    rows, columns = ((across, across + 1), (along, along)) if "trans" in parts else ((along, along), (across, across + 1))

    def places(program: Program, mask: Mask, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the active threads, the addresses of their two elements [threads, 2])"""
        threads = program.thread if mask is None else np.flatnonzero(mask)
        named = at(program)[threads].reshape(-1, 32)[:, 8 * number : 8 * number + 8]
        assert not (named % 16).any()
        return threads, np.stack([named[:, r] + 2 * c for r, c in zip(rows, columns, strict=True)], -1).reshape(-1, 2)

    def load(program: Program, mask: Mask) -> None:
        handler = []
        for number in range(len(registers)):
            threads, found = places(program, mask, number)
            values = np.zeros(program.num_threads, np.uint32)
            program.shared.history.load(program.clock, np.repeat(threads, 2), found.ravel(), 2)
            values[threads] = program.shared.load(found.ravel(), 2).reshape(-1, 4).view(np.uint32).ravel()
            handler.append(values)
        for register, values in zip(registers, handler, strict=True):
            write(program, register, values, mask)

    sources = [read(register, "b32") for register in registers] if parts[0] == "stmatrix" else []

    def store(program: Program, mask: Mask) -> None:
        for number, source in enumerate(sources):
            threads, found = places(program, mask, number)
            values = np.broadcast_to(source(program), program.num_threads)[threads]
            _checked_store(
                program, program.shared, np.repeat(threads, 2), found.ravel(), np.ascontiguousarray(values).view(np.uint8).reshape(-1, 2)
            )

    return load if parts[0] == "ldmatrix" else store


def memory(instruction: Instruction, parts: list[str]) -> Step | None:
    if parts[:2] == ["ld", "param"]:
        return _load_param(instruction, parts[-1])
    handler = {"ld": _load, "st": _store, "atom": _add_atomically}.get(parts[0])
    return None if handler is None or "async" in parts else handler(instruction, parts)


def _load_param(instruction: Instruction, kind: str) -> Step:
    target_register, place = instruction.operands
    assert isinstance(place, Address) and isinstance(place.base, str)
    name = place.base
    return lambda program, mask: write(program, target_register, program.params[name].astype(TYPES[kind]), mask)


def _load(instruction: Instruction, parts: list[str]) -> Step:
    registers = instruction.operands[0] if isinstance(instruction.operands[0], tuple) else instruction.operands[:1]
    at, memory_of, kind = _memory_access(instruction.operands[1], parts)
    is_strong, acquires, is_incoherent = _is_strong(parts), "acquire" in parts, "nc" in parts

    def load(program: Program, mask: Mask) -> None:
        size = np.dtype(kind).itemsize * len(registers)
        loaded = np.zeros((program.num_threads, len(registers)), kind)
        active = slice(None) if mask is None else mask
        memory, addresses, threads = memory_of(program), at(program)[active], program.thread[active]
        _count_bank_conflicts(program, instruction, at(program), mask, size)
        memory.history.load(program.clock, threads, addresses, size, is_strong)
        if acquires:
            for thread, address in zip(threads, addresses, strict=True):
                memory.history.acquire(program.clock, int(thread), int(address))
        assert not (is_incoherent and memory.history.was_stored(addresses, size)), f"a launch stores what {instruction.text} loads"
        loaded[active] = np.ascontiguousarray(memory.load(addresses, size)).view(kind)
        for register, column in zip(registers, loaded.T, strict=True):
            write(program, register, np.ascontiguousarray(column), mask)

    return load


def _is_strong(parts: list[str]) -> bool:
    """Whether an access is strong in a scope that includes the other CTAs."""
    return not {"acquire", "relaxed", "release", "volatile"}.isdisjoint(parts) and "cta" not in parts


def _store(instruction: Instruction, parts: list[str]) -> Step:
    stored = instruction.operands[1] if isinstance(instruction.operands[1], tuple) else instruction.operands[1:]
    at, memory_of, _ = _memory_access(instruction.operands[0], parts)
    sources = [read(register, parts[-1]) for register in stored]
    releases = "release" in parts

    def store(program: Program, mask: Mask) -> None:
        columns = [np.broadcast_to(source(program), program.num_threads) for source in sources]
        values = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)
        active = slice(None) if mask is None else mask
        addresses, threads = at(program)[active], program.thread[active]
        _count_bank_conflicts(program, instruction, at(program), mask, values.shape[1])
        _checked_store(program, memory_of(program), threads, addresses, values[active])
        if releases:
            for thread, address in zip(threads, addresses, strict=True):
                memory_of(program).history.release(program.clock, int(thread), int(address))

    return store


def _checked_store(
    program: Program, memory: Memory, threads: NDArray[np.int64], addresses: NDArray[np.int64], values: NDArray[np.uint8]
) -> None:
    before = memory.load(addresses, values.shape[1])
    memory.history.store(program.clock, threads, addresses, values, before)
    memory.store(addresses, values)


def _count_bank_conflicts(program: Program, instruction: Instruction, addresses: NDArray[np.int64], mask: Mask, size: int) -> None:
    """Count the bank conflicts of the warps whose lanes are all active."""
    if "shared" not in instruction.name:
        return
    whole = addresses.reshape(-1, 32) if mask is None else addresses.reshape(-1, 32)[mask.reshape(-1, 32).all(1)]
    program.bank_conflicts[instruction.name] += bank_conflicts(whole.ravel(), size)


def _add_atomically(instruction: Instruction, parts: list[str]) -> Step:
    """atom.add: one thread after another."""
    assert parts[-2] == "add", instruction.text
    at, memory_of, kind = _memory_access(instruction.operands[1], parts)
    added = read(instruction.operands[2], parts[-1])
    semantics = next((part for part in parts if part in ("acquire", "release", "acq_rel")), "relaxed") if "cta" not in parts else "relaxed"

    def add(program: Program, mask: Mask) -> None:
        before = np.zeros(program.num_threads, kind)
        amounts, memory = np.broadcast_to(added(program), program.num_threads), memory_of(program)
        for thread in program.thread if mask is None else np.flatnonzero(mask):
            place = at(program)[thread : thread + 1]
            memory.history.atomic(program.clock, int(thread), int(place[0]), before.itemsize, semantics)
            before[thread] = memory.load(place, before.itemsize).view(kind)[0, 0]
            memory.store(place, (before[thread : thread + 1] + amounts[thread]).view(np.uint8)[None])
        write(program, instruction.operands[0], before, mask)

    return add


def _memory_access(place: Operand, parts: list[str]) -> tuple[Read, Callable[[Program], Memory], Any]:
    """(function of the addresses, function of the memory, dtype of one element)"""
    assert isinstance(place, Address)
    if "shared" in parts:
        return addresses_of(place, "u32"), lambda program: program.shared, TYPES[parts[-1]]
    return addresses_of(place, "u64"), lambda program: program.memory, TYPES[parts[-1]]


def async_copies(instruction: Instruction, parts: list[str]) -> Step | None:
    """cp.async, in its bulk form too."""
    if parts[:2] != ["cp", "async"]:
        return None
    if parts[2] in ("commit_group", "wait_group"):
        return group_operations(instruction, parts, lambda program: program.copies)
    if parts[2] == "mbarrier":
        return None
    target_address, source, *sizes = instruction.operands
    assert isinstance(target_address, Address) and isinstance(source, Address)
    target, origin = addresses_of(target_address, "u32"), addresses_of(source, "u64")
    if parts[2] == "bulk":
        return _bulk_copy(target, origin, *sizes)
    size = sizes[0]
    assert isinstance(size, int)
    count = read(sizes[1] if len(sizes) > 1 else size, "u32")

    def copy(program: Program, mask: Mask) -> None:
        into, out_of = target(program), origin(program)
        copied = np.broadcast_to(count(program), program.num_threads).astype(np.int64)  # bytes per thread; 0: zeros are stored
        assert np.isin(copied if mask is None else copied[mask], (0, size)).all()
        issuing = program.thread if mask is None else np.flatnonzero(mask)
        loading = issuing[copied[issuing] > 0]
        program.shared.history.issue_copy(program.clock, issuing, into[issuing], size)
        program.memory.history.load_by_copy(program.clock, loading, out_of[loading], size)

        def arrive(threads: NDArray[np.int64]) -> None:
            values = np.zeros((len(threads), size), np.uint8)
            has_source = copied[threads] > 0
            if has_source.any():
                values[has_source] = program.memory.load(out_of[threads[has_source]], size)
            program.shared.history.store_by_copy(program.clock, threads, into[threads], size)
            program.shared.store(into[threads], values)

        program.copies.issue(mask, arrive)

    return copy


def _bulk_copy(target: Read, origin: Read, size: Operand, barrier: Operand) -> Step:
    assert isinstance(size, int) and isinstance(barrier, Address)
    arrivals = addresses_of(barrier, "u32")

    def copy(program: Program, mask: Mask) -> None:
        for thread in map(int, program.thread if mask is None else np.flatnonzero(mask)):
            into, out_of = (part(program)[thread] + np.arange(0, size, 16) for part in (target, origin))
            at = int(arrivals(program)[thread])
            barrier = program.arrivals[at]
            program.shared.history.async_load(program.clock, thread, np.array([at]), 8)
            program.memory.history.async_load(program.clock, thread, out_of, 16)
            program.shared.history.issue_bulk_copy(program.clock, thread, into, 16)
            program.clock.observed[barrier.number][:] = False

            def arrive(into: NDArray[np.int64] = into, out_of: NDArray[np.int64] = out_of, number: int = barrier.number) -> None:
                program.shared.history.store_by_bulk_copy(into, 16, number)
                program.shared.store(into, program.memory.load(out_of, 16))

            barrier.issue_copy(size, arrive)

    return copy


def group_operations(instruction: Instruction, parts: list[str], queue: Callable[[Program], Any]) -> Step | None:
    """commit_group and wait_group of copies or of wgmma."""
    if "commit_group" in parts:
        return lambda program, mask: queue(program).commit(mask)
    if "wait_group" in parts:
        return lambda program, mask: queue(program).wait(mask, instruction.operands[0])
    return None
