"""Loads and stores, copies that go on by themselves, and what lanes of a warp give each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulated.arithmetic import TYPES, Values
from emulated.memory import needless_turns
from emulated.operands import Mask, Read, Step, addresses_of, read, write
from emulated.parse import Instruction, Operand, Place
from emulated.queues import Arrivals

if TYPE_CHECKING:
    from emulated.memory import Memory
    from emulated.program import Program


def exchange(one: Instruction, parts: list[str]) -> Step | None:
    """Between the lanes of a warp; all of them take part."""
    if parts[0] == "shfl":
        to, source, amount, *_ = one.operands
        values, distance = read(source, "b32"), read(amount, "u32")
        moves: dict[str, Callable[..., Values]] = {
            "bfly": lambda lane, by: lane ^ by, "idx": lambda lane, by: by, "down": lambda lane, by: lane + by,
            "up": lambda lane, by: lane - by,
        }  # fmt: skip
        move = moves[parts[2]]

        def shuffle(program: Program, mask: Mask) -> None:
            other = np.broadcast_to(move(program.lane, distance(program).astype(np.int64)), program.num_threads)
            inside = (other >= 0) & (other < 32)
            write(program, to, values(program)[np.where(inside, program.lane_zero + other, program.thread)], mask)

        return shuffle
    if parts[0] == "redux":
        to, source, _ = one.operands
        values = read(source, parts[-1])
        join = {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[parts[2]]

        def reduce(program: Program, mask: Mask) -> None:
            write(program, to, np.repeat(join(values(program).reshape(-1, 32), axis=1), 32), mask)

        return reduce
    return None


def matrices(one: Instruction, parts: list[str]) -> Step | None:
    """ldmatrix and stmatrix: eight lanes name the rows of 8 × 16 bits of a matrix, of which every lane has two neighbours."""
    if parts[0] not in ("ldmatrix", "stmatrix"):
        return None
    place, given = one.operands[1 if parts[0] == "ldmatrix" else 0], one.operands[0 if parts[0] == "ldmatrix" else 1]
    assert isinstance(place, Place)
    registers = given if isinstance(given, tuple) else (given,)
    at, lane = addresses_of(place, "u32"), np.arange(32)
    along, across = lane // 4, lane % 4 * 2
    rows, columns = ((across, across + 1), (along, along)) if "trans" in parts else ((along, along), (across, across + 1))

    def places(program: Program, mask: Mask, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the threads, their two numbers' addresses [threads, 2])"""
        threads = program.thread if mask is None else np.flatnonzero(mask)
        named = at(program)[threads].reshape(-1, 32)[:, 8 * number : 8 * number + 8]
        assert not (named % 16).any()
        return threads, np.stack([named[:, r] + 2 * c for r, c in zip(rows, columns, strict=True)], -1).reshape(-1, 2)

    def load(program: Program, mask: Mask) -> None:
        made = []
        for number in range(len(registers)):
            threads, found = places(program, mask, number)
            values = np.zeros(program.num_threads, np.uint32)
            values[threads] = program.shared.load(found.ravel(), 2).reshape(-1, 4).view(np.uint32).ravel()
            made.append(values)
        for register, values in zip(registers, made, strict=True):
            write(program, register, values, mask)

    sources = [read(register, "b32") for register in registers] if parts[0] == "stmatrix" else []

    def store(program: Program, mask: Mask) -> None:
        for number, source in enumerate(sources):
            threads, found = places(program, mask, number)
            values = np.broadcast_to(source(program), program.num_threads)[threads]
            program.shared.store(found.ravel(), np.ascontiguousarray(values).view(np.uint8).reshape(-1, 2))

    return load if parts[0] == "ldmatrix" else store


def memory(one: Instruction, parts: list[str]) -> Step | None:
    if parts[:2] == ["ld", "param"]:
        return _take_param(one, parts[-1])
    made = {"ld": _load, "st": _store, "atom": _add_atomically}.get(parts[0])
    return None if made is None or "async" in parts else made(one, parts)


def _take_param(one: Instruction, kind: str) -> Step:
    to, place = one.operands
    assert isinstance(place, Place) and isinstance(place.base, str)
    name = place.base
    return lambda program, mask: write(program, to, program.params[name].astype(TYPES[kind]), mask)


def _load(one: Instruction, parts: list[str]) -> Step:
    registers = one.operands[0] if isinstance(one.operands[0], tuple) else one.operands[:1]
    at, of, kind = _where(one.operands[1], parts)

    def load(program: Program, mask: Mask) -> None:
        size = np.dtype(kind).itemsize * len(registers)
        found = np.zeros((program.num_threads, len(registers)), kind)
        mine = slice(None) if mask is None else mask
        _count_turns(program, one, at(program), mask, size)
        found[mine] = np.ascontiguousarray(of(program).load(at(program)[mine], size)).view(kind)
        for register, column in zip(registers, found.T, strict=True):
            write(program, register, np.ascontiguousarray(column), mask)

    return load


def _store(one: Instruction, parts: list[str]) -> Step:
    given = one.operands[1] if isinstance(one.operands[1], tuple) else one.operands[1:]
    at, of, _ = _where(one.operands[0], parts)
    sources = [read(register, parts[-1]) for register in given]

    def store(program: Program, mask: Mask) -> None:
        columns = [np.broadcast_to(source(program), program.num_threads) for source in sources]
        values = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)
        mine = slice(None) if mask is None else mask
        _count_turns(program, one, at(program), mask, values.shape[1])
        of(program).store(at(program)[mine], values[mine])

    return store


def _count_turns(program: Program, one: Instruction, addresses: NDArray[np.int64], mask: Mask, size: int) -> None:
    """Of warps all of whose lanes take part."""
    if "shared" not in one.name:
        return
    whole = addresses.reshape(-1, 32) if mask is None else addresses.reshape(-1, 32)[mask.reshape(-1, 32).all(1)]
    program.turns[one.name] += needless_turns(whole.ravel(), size)


def _add_atomically(one: Instruction, parts: list[str]) -> Step:
    """One thread after another."""
    assert parts[-2] == "add", one.text
    at, of, kind = _where(one.operands[1], parts)
    added = read(one.operands[2], parts[-1])

    def add(program: Program, mask: Mask) -> None:
        before = np.zeros(program.num_threads, kind)
        amounts = np.broadcast_to(added(program), program.num_threads)
        for thread in program.thread if mask is None else np.flatnonzero(mask):
            place = at(program)[thread : thread + 1]
            before[thread] = of(program).load(place, before.itemsize).view(kind)[0, 0]
            of(program).store(place, (before[thread : thread + 1] + amounts[thread]).view(np.uint8)[None])
        write(program, one.operands[0], before, mask)

    return add


def _where(place: Operand, parts: list[str]) -> tuple[Read, Callable[[Program], Memory], Any]:
    """(addresses, the memory they are of, the type of what lies there)"""
    assert isinstance(place, Place)
    if "shared" in parts:
        return addresses_of(place, "u32"), lambda program: program.shared, TYPES[parts[-1]]
    return addresses_of(place, "u64"), lambda program: program.memory, TYPES[parts[-1]]


def copies(one: Instruction, parts: list[str]) -> Step | None:
    """cp.async"""
    if parts[:2] != ["cp", "async"]:
        return None
    if parts[2] in ("commit_group", "wait_group"):
        return queued(one, parts, lambda program: program.copies)
    to, source, *sizes = one.operands
    assert isinstance(to, Place) and isinstance(source, Place)
    target, origin = addresses_of(to, "u32"), addresses_of(source, "u64")
    if parts[2] == "bulk":
        return _bulk_copy(target, origin, *sizes)
    size = sizes[0]
    assert isinstance(size, int)
    count = read(sizes[1] if len(sizes) > 1 else size, "u32")

    def copy(program: Program, mask: Mask) -> None:
        into, out_of = target(program), origin(program)
        there = np.broadcast_to(count(program), program.num_threads).astype(np.int64)
        assert np.isin(there if mask is None else there[mask], (0, size)).all()

        def arrive(threads: NDArray[np.int64]) -> None:
            given = np.zeros((len(threads), size), np.uint8)
            kept = there[threads] > 0
            if kept.any():
                given[kept] = program.memory.load(out_of[threads[kept]], size)
            program.shared.store(into[threads], given)

        program.copies.ask(mask, arrive)

    return copy


def _bulk_copy(target: Read, origin: Read, size: Operand, barrier: Operand) -> Step:
    assert isinstance(size, int) and isinstance(barrier, Place)
    arrivals = addresses_of(barrier, "u32")

    def copy(program: Program, mask: Mask) -> None:
        for thread in program.thread if mask is None else np.flatnonzero(mask):
            into, out_of = (part(program)[thread] + np.arange(0, size, 16) for part in (target, origin))
            arrive = lambda into=into, out_of=out_of: program.shared.store(into, program.memory.load(out_of, 16))  # noqa: E731
            program.arrivals[int(arrivals(program)[thread])].bring(size, arrive)

    return copy


def queued(one: Instruction, parts: list[str], queue: Callable[[Program], Any]) -> Step | None:
    """Closing a group of what was asked for, and waiting for groups."""
    if "commit_group" in parts:
        return lambda program, mask: queue(program).close(mask)
    if "wait_group" in parts:
        return lambda program, mask: queue(program).wait(mask, one.operands[0])
    return None


def barriers(one: Instruction, parts: list[str]) -> Step | None:
    """mbarrier"""
    if parts[0] != "mbarrier":
        return None
    place = one.operands[1 if parts[1] in ("arrive", "try_wait") else 0]
    assert isinstance(place, Place)
    at = addresses_of(place, "u32")
    number = one.operands[-1]
    assert isinstance(number, int)

    def run(program: Program, mask: Mask) -> None:
        passed = np.zeros(program.num_threads, bool)
        known: dict[int, bool] = {}
        for thread in program.thread if mask is None else np.flatnonzero(mask):
            address = int(at(program)[thread])
            if parts[1] == "init":
                program.arrivals[address] = Arrivals(number)
            elif parts[1] == "arrive":
                program.arrivals[address].expect(number)
            else:
                if address not in known:
                    known[address] = program.arrivals[address].has_ended(number)
                passed[thread] = known[address]
        if parts[1] == "try_wait":
            write(program, one.operands[0], passed, mask)

    return run
