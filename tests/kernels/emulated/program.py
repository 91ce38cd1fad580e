"""The CTAs of a launch, thread by thread: divergence of warps, barriers, asynchronous operations, and CTAs in a random order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from emulated.instructions import step
from emulated.memory import Memory
from emulated.operands import UNSIGNED, Mask, Step
from emulated.ordering import Clock, History, RaceError
from emulated.parse import Instruction, Kernel
from emulated.queues import Arrivals, Queue

Threads = NDArray[np.int64]
Index = tuple[int, int, int]
MAX_TURNS = 1000  # per CTA, without one that ends or stores


@dataclass(frozen=True, slots=True)
class Launch:
    """What the CTAs of a launch share. bank_conflicts: of shared memory, counted by instruction."""

    kernel: Kernel
    params: Mapping[str, NDArray[np.uint64]]
    memory: Memory
    shared_bytes: int
    grid: Index
    seed: int  # of the order of CTAs, and of the warps that are late
    waits_for_predecessor: bool  # launched as a dependent of the launch before
    bank_conflicts: Counter[str]


class Program:
    """One CTA: its threads' registers, its shared memory and its asynchronous operations."""

    def __init__(self, launch: Launch, steps: list[Step | None], index: Index, pick: random.Random) -> None:
        kernel, grid = launch.kernel, launch.grid
        self.kernel, self.steps, self.params, self.memory, self.num_threads = kernel, steps, launch.params, launch.memory, kernel.threads
        self.shared = Memory(launch.shared_bytes)
        self.shared.history = History("shared", launch.shared_bytes, 0, kernel.granule("shared"), kernel.has_async_proxy)
        number = (index[2] * grid[1] + index[1]) * grid[0] + index[0]
        self.clock = Clock(number, grid[0] * grid[1] * grid[2], self.num_threads, launch.waits_for_predecessor)
        self.thread = np.arange(self.num_threads)
        self.lane, self.lane_zero = self.thread % 32, self.thread // 32 * 32
        blank = {width: np.full(self.num_threads, -1 if width > 1 else 0).astype(kind) for width, kind in UNSIGNED.items()}
        self.registers = [blank[width] for width in kernel.widths]
        self.bank_conflicts = launch.bank_conflicts
        self.copies, self.products = Queue(self.num_threads // 32), Queue(self.num_threads // 32)
        self.arrivals: dict[int, Arrivals] = {}  # mbarriers by address
        self._at = np.zeros(self.num_threads, np.int64)  # each thread's next instruction, where they differ
        self._none, self._pick = np.zeros(self.num_threads, bool), pick
        everywhere = lambda value: np.full(self.num_threads, value)  # noqa: E731
        self._special = {
            "%tid.x": self.thread, "%laneid": self.lane, "%warpid": self.thread // 32, "global_smem": everywhere(0),
            **{f"%ctaid.{axis}": everywhere(at) for axis, at in zip("xyz", index, strict=True)},
            **{f"%nctaid.{axis}": everywhere(size) for axis, size in zip("xyz", grid, strict=True)},
        }  # fmt: skip

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
        """Run until all threads have ended. Yields where another CTA may run first.

        After a barrier some warps, chosen at random, continue only when the others wait at the next one.
        """
        now, late = 0, self._late_warps()
        while now >= 0:
            if np.count_nonzero(late):
                self._at[:] = now
                now = yield from self._run_apart(late)
                late = self._none
                continue
            one, run = self.kernel.instructions[now], self.steps[now]
            chosen = None if one.guard is None else self._chosen(one)
            is_active = chosen is None or np.count_nonzero(chosen) > 0
            if chosen is not None and np.count_nonzero(chosen) == self.num_threads:
                chosen = None
            if run is not None:
                if one.depends_on_others:
                    yield
                if is_active:
                    run(self, chosen)
                now += 1
            elif not is_active:
                now += 1
            elif one.name.startswith("bar.warp"):
                self.clock.warp_barrier(chosen)
                now += 1
            elif chosen is not None:
                self._diverge(one, chosen, now)
                now = yield from self._run_apart(self._none)
            elif one.name.startswith("bra"):
                now = one.target
            elif one.name == "ret":
                return
            else:
                yield
                self.clock.cta_barrier()
                now, late = now + 1, self._late_warps()

    def _late_warps(self) -> NDArray[np.bool_]:
        return np.repeat([self._pick.random() < 0.3 for _ in range(self.num_threads // 32)], 32)

    def _chosen(self, one: Instruction) -> NDArray[np.bool_]:
        assert one.guard is not None
        return self.registers[one.guard[0].index] ^ one.guard[1]

    def _diverge(self, one: Instruction, chosen: NDArray[np.bool_], now: int) -> None:
        assert one.name.startswith("bra"), one.text
        self._at[:] = np.where(chosen, one.target, now + 1)

    def _run_apart(self, late: NDArray[np.bool_]) -> Generator[None, None, int]:
        """Run threads at different instructions until all are at the same one, which is returned (-1: the end)."""
        at, waits, ended = self._at, np.zeros(self.num_threads, bool), np.zeros(self.num_threads, bool)
        while True:
            able = ~(waits | ended)
            if not np.count_nonzero(able):
                if not np.count_nonzero(waits):
                    return -1
                assert len(set(at[waits])) == 1, "threads wait at different barriers"
                yield
                self.clock.cta_barrier()
                return int(at[waits][0]) + 1
            if np.count_nonzero(early := able & ~late):
                able = early
            now = int(at[able].min())  # the threads that are behind run first, so that lanes of a warp converge
            mine = able & (at == now)
            if np.count_nonzero(mine) == self.num_threads:
                return now
            others = at[able & ~mine]
            end = int(others.min()) if len(others) else len(self.steps)
            now = self._run_straight(now, mine, end)
            at[mine] = now
            if now == end:
                continue  # with these others, if they are able
            one, run = self.kernel.instructions[now], self.steps[now]
            chosen = mine if one.guard is None else mine & self._chosen(one)
            if run is not None:
                yield
                late = mine  # other threads run first: it may wait for them
                if np.count_nonzero(chosen):
                    run(self, chosen)
                at[mine] = now + 1
            elif one.name.startswith("bra"):
                at[mine] = np.where(chosen[mine], one.target, now + 1)
            elif one.name == "ret":
                ended |= chosen
                at[mine] = now + 1
            elif one.name.startswith("bar.warp"):
                assert (mine.reshape(-1, 32).any(1) == mine.reshape(-1, 32).all(1)).all(), "half of a warp is at its barrier"
                self.clock.warp_barrier(mine)
                at[mine] = now + 1
            else:
                waits |= chosen

    def _run_straight(self, now: int, mine: NDArray[np.bool_], end: int) -> int:
        """Run some threads until `end`, a control instruction, or one whose result depends on other threads. Returns where they are."""
        while now < end:
            one, run = self.kernel.instructions[now], self.steps[now]
            if run is None or one.depends_on_others:
                return now
            chosen = mine if one.guard is None else mine & self._chosen(one)
            if one.guard is None or np.count_nonzero(chosen):
                run(self, chosen)
            now += 1
        return now


def _is_control(one: Instruction) -> bool:
    return one.name.startswith(("bra", "bar.", "barrier.")) or one.name == "ret"


def run_grid(launch: Launch) -> list[Clock]:
    """Run all CTAs of a launch in random turns. Returns their clocks."""
    pick = random.Random(launch.seed)
    steps = [None if _is_control(one) else step(one) for one in launch.kernel.instructions]
    programs = [Program(launch, steps, (x, y, z), pick) for x, y, z in product(*map(range, launch.grid))]
    running = {program: program.run() for program in programs}
    turns, stores = 0, 0
    while running:
        one = pick.choice(list(running))
        try:
            next(running[one])
        except StopIteration:
            del running[one]
            one.check_end()
            turns = 0
        turns, stores = (turns + 1, stores) if stores == launch.memory.num_stores else (0, launch.memory.num_stores)
        assert turns <= MAX_TURNS * max(1, len(running)), "all CTAs wait for each other"
    return [program.clock for program in programs]
