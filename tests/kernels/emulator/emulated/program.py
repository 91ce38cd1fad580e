"""Runs the CTAs of a launch thread by thread, in a random order, with divergent warps, barriers and asynchronous operations."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from emulated.instructions import step_of
from emulated.memory import Memory
from emulated.operands import UNSIGNED, Mask, Step
from emulated.ordering import Clock, History, NoHistory, RaceError
from emulated.parse import Instruction, Kernel, parse
from emulated.queues import Arrivals, Queue
from emulated.tensor_copies import TensorMap
from emulated.warps import Warps

Threads = NDArray[np.int64]
Index = tuple[int, int, int]
TENSOR_MAPS = 1 << 48  # the address of the first tensor map among the parameters
MAX_TURNS = 1000  # per CTA, without one that ends or stores


@dataclass(frozen=True, slots=True)
class Launch:
    """What all CTAs of a launch share. bank_conflicts: of shared memory, counted by instruction name."""

    kernel: Kernel
    steps: Sequence[Step | None]  # of the kernel's instructions; None: control flow
    params: Mapping[str, NDArray[np.uint64]]
    memory: Memory
    shared_bytes: int
    grid: Index
    waits_for_predecessor: bool  # launched with the PDL attribute
    bank_conflicts: Counter[str]
    tensor_maps: Mapping[str, TensorMap]  # by the name of their parameter

    @property
    def num_ctas(self) -> int:
        return math.prod(self.grid)


class Program:
    """One CTA: the registers of its threads, its shared memory, and its pending asynchronous operations.

    number, num_ctas: its number among the CTAs of all launches that run together, and their number.
    """

    def __init__(self, launch: Launch, index: Index, number: int, num_ctas: int, generator: random.Random) -> None:
        kernel, grid = launch.kernel, launch.grid
        self.kernel, self.steps, self.num_threads = kernel, launch.steps, kernel.threads
        self.params, self.memory = launch.params, launch.memory
        self.shared = Memory(launch.shared_bytes)
        self.shared.history = NoHistory("shared")
        if not kernel.is_warp_specialized:
            self.shared.history = History("shared", launch.shared_bytes, 0, kernel.granule("shared"), kernel.has_async_proxy)
        self.clock = Clock(number, num_ctas, self.num_threads, launch.waits_for_predecessor)
        self.thread = np.arange(self.num_threads)
        self.lane, self.lane_zero = self.thread % 32, self.thread // 32 * 32
        unset = {width: np.full(self.num_threads, -1 if width > 1 else 0).astype(kind) for width, kind in UNSIGNED.items()}
        self.registers = [unset[width] for width in kernel.widths]
        self.bank_conflicts = launch.bank_conflicts
        self.copies, self.products, self.bulk_stores = (Queue(self.num_threads // 32) for _ in range(3))
        places = {name: TENSOR_MAPS + 128 * i for i, name in enumerate(launch.tensor_maps)}
        self.tensor_maps = {places[name]: tensor_map for name, tensor_map in launch.tensor_maps.items()}  # by their address
        self.arrivals: dict[int, Arrivals] = {}  # mbarriers by address
        self._at = np.zeros(self.num_threads, np.int64)  # each thread's next instruction, where they differ
        self._none, self.generator = np.zeros(self.num_threads, bool), generator
        for_all_threads = lambda value: np.full(self.num_threads, value)  # noqa: E731
        self._special = {
            "%tid.x": self.thread,
            "%laneid": self.lane,
            "%warpid": self.thread // 32,
            "global_smem": for_all_threads(0),
            **{name: for_all_threads(place) for name, place in places.items()},
            **{f"%ctaid.{axis}": for_all_threads(at) for axis, at in zip("xyz", index, strict=True)},
            **{f"%nctaid.{axis}": for_all_threads(size) for axis, size in zip("xyz", grid, strict=True)},
        }

    def proxy_fence(self, spaces: Iterable[str], mask: Mask) -> None:
        for memory in (self.memory, self.shared):
            if memory.history.space in spaces:
                memory.history.proxy_fence(self.clock, mask)

    def check_end(self) -> None:
        if any(barrier.has_pending_copies for barrier in self.arrivals.values()):
            raise RaceError(f"CTA {self.clock.cta} ends while a bulk copy into its shared memory is pending")

    def special(self, name: str) -> Threads:
        return self._special[name]

    def run(self) -> Iterator[None]:
        """Run until all threads have ended. Yields at each point where another CTA may run first.

        After a barrier some warps, chosen at random, continue only when the others wait at the next one.
        """
        if self.kernel.is_warp_specialized:
            yield from Warps(self).run()
            return
        now, late = 0, self._late_warps()
        while now >= 0:
            if np.count_nonzero(late):
                self._at[:] = now
                now = yield from self._run_diverged(late)
                late = self._none
                continue
            instruction, run = self.kernel.instructions[now], self.steps[now]
            enabled = None if instruction.predicate is None else self.predicate_mask(instruction)
            is_active = enabled is None or np.count_nonzero(enabled) > 0
            if enabled is not None and np.count_nonzero(enabled) == self.num_threads:
                enabled = None
            if run is not None:
                if instruction.depends_on_others:
                    yield
                if is_active:
                    run(self, enabled)
                now += 1
            elif not is_active:
                now += 1
            elif instruction.name.startswith("bar.warp"):
                self.clock.warp_barrier(enabled)
                now += 1
            elif enabled is not None:
                self._set_diverged(instruction, enabled, now)
                now = yield from self._run_diverged(self._none)
            elif instruction.name.startswith("bra"):
                now = instruction.target
            elif instruction.name == "ret":
                return
            else:
                yield
                self.clock.cta_barrier()
                now, late = now + 1, self._late_warps()

    def _late_warps(self) -> NDArray[np.bool_]:
        return np.repeat([self.generator.random() < 0.3 for _ in range(self.num_threads // 32)], 32)

    def predicate_mask(self, instruction: Instruction) -> NDArray[np.bool_]:
        assert instruction.predicate is not None
        return self.registers[instruction.predicate[0].index] ^ instruction.predicate[1]

    def _set_diverged(self, instruction: Instruction, enabled: NDArray[np.bool_], now: int) -> None:
        assert instruction.name.startswith("bra"), instruction.text
        self._at[:] = np.where(enabled, instruction.target, now + 1)

    def _run_diverged(self, late: NDArray[np.bool_]) -> Generator[None, None, int]:
        """Run diverged threads until all reach the same instruction. Returns its index, or -1 if all threads have ended."""
        at, waits, ended = self._at, np.zeros(self.num_threads, bool), np.zeros(self.num_threads, bool)
        while True:
            runnable = ~(waits | ended)
            if not np.count_nonzero(runnable):
                if not np.count_nonzero(waits):
                    return -1
                assert len(set(at[waits])) == 1, "threads wait at different barriers"
                yield
                self.clock.cta_barrier()
                return int(at[waits][0]) + 1
            if np.count_nonzero(early := runnable & ~late):
                runnable = early
            now = int(at[runnable].min())  # the threads that are behind run first, so that lanes of a warp converge
            current = runnable & (at == now)
            if np.count_nonzero(current) == self.num_threads:
                return now
            others = at[runnable & ~current]
            end = int(others.min()) if len(others) else len(self.steps)
            now = self._run_straight(now, current, end)
            at[current] = now
            if now == end:
                continue  # with these others, if they are able
            instruction, run = self.kernel.instructions[now], self.steps[now]
            enabled = current if instruction.predicate is None else current & self.predicate_mask(instruction)
            if run is not None:
                yield
                late = current  # other threads run first: it may wait for them
                if np.count_nonzero(enabled):
                    run(self, enabled)
                at[current] = now + 1
            elif instruction.name.startswith("bra"):
                at[current] = np.where(enabled[current], instruction.target, now + 1)
            elif instruction.name == "ret":
                ended |= enabled
                at[current] = now + 1
            elif instruction.name.startswith("bar.warp"):
                assert (current.reshape(-1, 32).any(1) == current.reshape(-1, 32).all(1)).all(), "half of a warp is at its barrier"
                self.clock.warp_barrier(current)
                at[current] = now + 1
            else:
                waits |= enabled

    def _run_straight(self, now: int, current: NDArray[np.bool_], end: int) -> int:
        """Run the threads `current` from `now` to `end`, a control instruction, or one that depends on other threads. Returns its index."""
        while now < end:
            instruction, run = self.kernel.instructions[now], self.steps[now]
            if run is None or instruction.depends_on_others:
                return now
            enabled = current if instruction.predicate is None else current & self.predicate_mask(instruction)
            if instruction.predicate is None or np.count_nonzero(enabled):
                run(self, enabled)
            now += 1
        return now


@lru_cache(16)
def parsed(ptx: str) -> tuple[Kernel, list[Step | None]]:
    """A kernel and the steps of its instructions, for `Launch`. Kept, because tests launch a kernel several times."""
    kernel = parse(ptx)
    return kernel, [None if _is_control(instruction) else step_of(instruction) for instruction in kernel.instructions]


def _is_control(instruction: Instruction) -> bool:
    return instruction.name.startswith(("bra", "brx", "bar.", "barrier.")) or instruction.name == "ret"


def run_grids(launches: Sequence[Launch], seed: int) -> list[Clock]:
    """Run all CTAs of launches that share a memory: of one device, or of one rank each. CTAs take turns at random. Returns their clocks.

    seed: of the order of CTAs, and of the warps that are delayed after a barrier.
    Raises AssertionError if all CTAs wait for each other.
    """
    generator, programs = random.Random(seed), list[Program]()
    num_ctas = sum(launch.num_ctas for launch in launches)
    for launch in launches:
        (width, height, _), first = launch.grid, len(programs)
        for x, y, z in product(*map(range, launch.grid)):
            number = first + (z * height + y) * width + x
            programs.append(Program(launch, (x, y, z), number, num_ctas, generator))
    memory, running = launches[0].memory, {program: program.run() for program in programs}
    turns, stores = 0, 0
    while running:
        program = generator.choice(list(running))
        try:
            next(running[program])
        except StopIteration:
            del running[program]
            program.check_end()
            turns = 0
        turns, stores = (turns + 1, stores) if stores == memory.num_stores else (0, memory.num_stores)
        assert turns <= MAX_TURNS * max(1, len(running)), "all CTAs wait for each other"
    return [program.clock for program in programs]
