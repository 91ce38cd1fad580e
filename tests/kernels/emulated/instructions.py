"""What each instruction does to a program: a function of the program and of the threads that take part (None: all)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from emulated import arithmetic
from emulated.arithmetic import COMPARES, PLAIN, TYPES, Values
from emulated.parse import Instruction, Operand, Place, Register

if TYPE_CHECKING:
    from emulated.program import Program

Mask = NDArray[np.bool_] | None
Step = Callable[["Program", Mask], None]
Read = Callable[["Program"], Values]
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NOTHING = {"griddepcontrol", "createpolicy", "fence", "prefetch", "cp.async.bulk", "nanosleep"}


def step(one: Instruction) -> Step:
    """Raises NotImplementedError for an instruction that no kernel here had yet."""
    parts = one.name.split(".")
    if parts[0] in NOTHING:
        return lambda program, mask: None
    for known in (_memory, _copies, _exchange, _products, _moves, _conversion, _special, _plain):
        made = known(one, parts)
        if made is not None:
            return made
    raise NotImplementedError(one.text)


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


def elementwise(to: Operand, sources: Iterable[Read], formula: Callable[..., Values]) -> Step:
    given = tuple(sources)

    def run(program: Program, mask: Mask) -> None:
        write(program, to, formula(*(source(program) for source in given)), mask)

    return run


def _plain(one: Instruction, parts: list[str]) -> Step | None:
    formula, kind = PLAIN.get(parts[0]), parts[-1]
    if formula is None or kind not in TYPES:
        return None
    to, *sources = one.operands
    if kind in ("bf16x2", "f16x2", "bf16"):
        return _of_halves(one, formula, kind)
    if "wide" in parts:
        wide = {"s32": np.int64, "u32": np.uint64, "s16": np.int32, "u16": np.uint32}[kind]
        kinds = [kind, kind, {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}[kind]][: len(sources)]
        return elementwise(to, map(read, sources, kinds), lambda *given: formula(*(v.astype(wide) for v in given)))
    if parts[0] in ("shl", "shr"):
        return elementwise(to, (read(sources[0], kind), read(sources[1], "u32")), formula)
    if "hi" in parts:
        bits = np.uint64(32)
        return elementwise(to, (read(s, kind) for s in sources), lambda a, b: a.astype(np.uint64) * b.astype(np.uint64) >> bits)
    if "NaN" in parts:
        exact = {"min": np.minimum, "max": np.maximum}[parts[0]]
        return elementwise(to, (read(s, kind) for s in sources), exact)
    return elementwise(to, (read(s, kind) for s in sources), formula)


def _of_halves(one: Instruction, formula: Callable[..., Values], kind: str) -> Step:
    """Arithmetic on 16-bit numbers, each result rounded once."""
    narrow = torch.float16 if kind == "f16x2" else torch.bfloat16

    def apply(*words: Values) -> Values:
        pairs = [arithmetic.widened_halves(word, narrow).astype(np.float64) for word in words]
        low, high = (formula(*(pair[i] for pair in pairs)).astype(np.float32) for i in range(2))
        return arithmetic.halves(low, high, narrow)

    return elementwise(one.operands[0], (read(s, "b32") for s in one.operands[1:]), apply)


def _moves(one: Instruction, parts: list[str]) -> Step | None:
    """mov of several registers, selp, setp."""
    to, *sources = one.operands
    if parts[0] == "selp":
        chosen = [read(source, parts[1]) for source in sources[:2]] + [read(sources[2], "pred")]
        return elementwise(to, chosen, lambda a, b, which: np.where(which, a, b))
    if parts[0] == "setp":
        compare = COMPARES[parts[1]]
        if len(sources) == 3:  # setp.lt.and.s32 p, a, b, q
            join = PLAIN[parts[2]]
            given = [read(sources[0], parts[-1]), read(sources[1], parts[-1]), read(sources[2], "pred")]
            return elementwise(to, given, lambda a, b, other: join(np.atleast_1d(compare(a, b)), other))
        return elementwise(to, (read(s, parts[-1]) for s in sources), lambda a, b: np.atleast_1d(compare(a, b)))
    if parts[0] != "mov":
        return None
    if isinstance(to, tuple):  # the lowest part first
        whole, count = read(sources[0], parts[1]), len(to)

        def split(program: Program, mask: Mask) -> None:
            value = np.broadcast_to(whole(program), program.num_threads)
            size = value.dtype.itemsize // count
            for part, values in zip(to, np.ascontiguousarray(value).view(f"u{size}").reshape(-1, count).T, strict=True):
                write(program, part, values, mask)

        return split
    if isinstance(sources[0], tuple):
        size = np.dtype(TYPES[parts[1]]).itemsize // len(sources[0])
        given = [read(part, f"b{8 * size}") for part in sources[0]]

        def join_parts(program: Program, mask: Mask) -> None:
            columns = np.stack([np.broadcast_to(part(program), program.num_threads) for part in given], 1)
            write(program, to, np.ascontiguousarray(columns).view(TYPES[parts[1]]).ravel(), mask)

        return join_parts
    return None


def _conversion(one: Instruction, parts: list[str]) -> Step | None:
    if parts[0] != "cvt":
        return None
    to, *sources = one.operands
    into, source = parts[-2], parts[-1]
    half = {"f16x2": torch.float16, "bf16x2": torch.bfloat16, "f16": torch.float16, "bf16": torch.bfloat16}
    if into == "e4m3x2":  # the upper one is named first
        return elementwise(to, (read(s, "f32") for s in sources), lambda high, low: arithmetic.codes(low, high))
    if source == "e4m3x2":
        return elementwise(to, [read(sources[0], "b16")], lambda word: arithmetic.halves(*arithmetic.decoded(word), torch.float16))
    if into in ("f16x2", "bf16x2"):
        return elementwise(to, (read(s, "f32") for s in sources), lambda high, low: arithmetic.halves(low, high, half[into]))
    if source == "bf16" and into == "f32":
        return elementwise(to, [read(sources[0], "b16")], lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    if into in half and source == "f32":
        return elementwise(to, [read(sources[0], "f32")], lambda value: arithmetic.narrowed(value, half[into]))
    if TYPES[source]().dtype.kind == "f" and TYPES[into]().dtype.kind != "f":
        modes = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        rounding = next(modes[part] for part in parts if part in modes)
        info = np.iinfo(TYPES[into])
        cut = lambda v: np.clip(np.nan_to_num(rounding(v.astype(np.float64))), info.min, info.max).astype(TYPES[into])  # noqa: E731
        return elementwise(to, [read(sources[0], source)], cut)
    return elementwise(to, [read(sources[0], source)], lambda value: value.astype(TYPES[into]))


def _special(one: Instruction, parts: list[str]) -> Step | None:
    to, *sources = one.operands if one.operands else ("_",)
    if parts[0] == "prmt":
        return elementwise(to, (read(s, "b32") for s in sources), arithmetic.permuted)
    if parts[0] == "lop3":
        table = sources[3]
        assert isinstance(table, int)
        return elementwise(to, (read(s, "b32") for s in sources[:3]), lambda a, b, c: arithmetic.looked_up(a, b, c, table))
    if parts[0] == "bfe" and parts[1] == "u32":
        return elementwise(to, (read(s, "u32") for s in sources), arithmetic.bits_of_field)
    return None


def _exchange(one: Instruction, parts: list[str]) -> Step | None:
    """Between the lanes of a warp; all of them take part."""
    if parts[0] == "shfl":
        to, source, amount, *_ = one.operands
        values, distance = read(source, "b32"), read(amount, "u32")
        move = {"bfly": lambda lane, by: lane ^ by, "idx": lambda lane, by: by, "down": lambda lane, by: lane + by}[parts[2]]

        def shuffle(program: Program, mask: Mask) -> None:
            other = np.broadcast_to(move(program.lane, distance(program)), program.num_threads)
            inside = other < 32
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


def _memory(one: Instruction, parts: list[str]) -> Step | None:
    if parts[0] not in ("ld", "st", "atom") or "async" in parts:
        return None
    kind = parts[-1]
    size = np.dtype(TYPES[kind]).itemsize
    if parts[1] == "param":
        to, place = one.operands
        assert isinstance(place, Place) and isinstance(place.base, str)
        name = place.base
        return lambda program, mask: write(program, to, program.params[name].astype(TYPES[kind]), mask)
    place = one.operands[1 if parts[0] != "st" else 0]
    assert isinstance(place, Place)
    at, is_shared = read(place.base, "u32" if "shared" in parts else "u64"), "shared" in parts

    def addresses(program: Program, mask: Mask) -> NDArray[np.int64]:
        found = np.broadcast_to(at(program), program.num_threads).astype(np.int64) + place.offset
        return found if mask is None else found[mask]

    if parts[0] == "atom":
        assert parts[-2] == "add"
        added = read(one.operands[2], kind)

        def atomic(program: Program, mask: Mask) -> None:
            before = np.zeros(program.num_threads, TYPES[kind])
            amounts = np.broadcast_to(added(program), program.num_threads)
            for thread in range(program.num_threads) if mask is None else np.flatnonzero(mask):
                one_place = addresses(program, program.thread == thread)
                before[thread] = program.memory.load(one_place, size).view(TYPES[kind])[0, 0]
                program.memory.store(one_place, (before[thread : thread + 1] + amounts[thread]).view(np.uint8)[None])
            write(program, one.operands[0], before, mask)

        return atomic
    given = one.operands[0 if parts[0] == "ld" else 1]
    registers = given if isinstance(given, tuple) else (given,)
    if parts[0] == "ld":

        def load(program: Program, mask: Mask) -> None:
            memory = program.shared if is_shared else program.memory
            found = np.ascontiguousarray(memory.load(addresses(program, mask), size * len(registers))).view(TYPES[kind])
            for register, column in zip(registers, found.T, strict=True):
                if mask is not None:
                    spread = np.zeros(program.num_threads, TYPES[kind])
                    spread[mask] = column
                    column = spread
                write(program, register, np.ascontiguousarray(column), mask)

        return load
    sources = [read(register, kind) for register in registers]

    def store(program: Program, mask: Mask) -> None:
        memory = program.shared if is_shared else program.memory
        columns = [np.broadcast_to(source(program), program.num_threads) for source in sources]
        values = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)
        memory.store(addresses(program, mask), values if mask is None else values[mask])

    return store


def _copies(one: Instruction, parts: list[str]) -> Step | None:
    """cp.async: what is copied is there at the last moment that waiting allows."""
    if parts[:2] != ["cp", "async"]:
        return None
    if parts[2] == "commit_group":
        return lambda program, mask: program.copies.close(mask)
    if parts[2] == "wait_group":
        after = one.operands[0]
        assert isinstance(after, int)
        return lambda program, mask: program.copies.wait(mask, after)
    to, source, size = one.operands[:3]
    there = one.operands[3] if len(one.operands) > 3 else size
    assert isinstance(to, Place) and isinstance(source, Place) and isinstance(size, int)
    target, origin, count = read(to.base, "u32"), read(source.base, "u64"), read(there, "u32")

    def copy(program: Program, mask: Mask) -> None:
        wide = [np.broadcast_to(part(program), program.num_threads).astype(np.int64) for part in (target, origin, count)]
        program.copies.ask(mask, wide[0] + to.offset, wide[1] + source.offset, wide[2], size)

    return copy


def _products(one: Instruction, parts: list[str]) -> Step | None:
    if parts[:2] != ["mma", "sync"]:
        return None
    from matrix_instructions import multiply

    to, *operands = one.operands
    into, left, right, _ = parts[-4:]
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "s8": torch.int8, "u8": torch.uint8}
    a, b, c = ([read(part, kind) for part in operand] for operand, kind in zip(operands, ("b32", "b32", into), strict=True))  # type: ignore[union-attr]

    def run(program: Program, mask: Mask) -> None:
        sums = multiply(*([part(program) for part in given] for given in (a, b, c)), kinds[left], kinds[right])
        for register, values in zip(to, sums, strict=True):  # type: ignore[arg-type]
            write(program, register, values, mask)

    return run
