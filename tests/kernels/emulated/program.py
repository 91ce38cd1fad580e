"""Programs of a kernel, thread by thread, as a device runs them: warps that part and come together, barriers, and copies under way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

from emulated.instructions import step
from emulated.memory import Memory
from emulated.operands import UNSIGNED, Step
from emulated.parse import Instruction, Kernel
from emulated.queues import Arrivals, Queue

Threads = NDArray[np.int64]
Index = tuple[int, int, int]
MOST_TURNS = 1000  # of each program, in which none ends and none stores what another may wait for


class Program:
    """One of a grid: its threads' registers and its shared memory."""

    def __init__(
        self, kernel: Kernel, steps: list[Step | None], params: Mapping[str, NDArray[np.uint64]], memory: Memory, shared_bytes: int,
        index: Index, grid: Index, pick: random.Random, turns: Counter[str],
    ) -> None:  # fmt: skip
        self.kernel, self.steps, self.params, self.memory, self.num_threads = kernel, steps, params, memory, kernel.threads
        self.shared = Memory(shared_bytes)
        self.thread = np.arange(self.num_threads)
        self.lane, self.lane_zero = self.thread % 32, self.thread // 32 * 32
        blank = {width: np.full(self.num_threads, -1 if width > 1 else 0).astype(kind) for width, kind in UNSIGNED.items()}
        self.registers = [blank[width] for width in kernel.widths]
        self.turns = turns  # that lanes lose in banks of shared memory, by instruction
        self.copies, self.products = Queue(self.num_threads // 32), Queue(self.num_threads // 32)
        self.arrivals: dict[int, Arrivals] = {}  # by address
        self._at = np.zeros(self.num_threads, np.int64)  # each thread's next instruction, where they differ
        self._no_warps, self._pick = np.zeros(self.num_threads, bool), pick
        one = lambda value: np.full(self.num_threads, value)  # noqa: E731
        self._special = {
            "%tid.x": self.thread, "%laneid": self.lane, "%warpid": self.thread // 32, "global_smem": one(0),
            **{f"%ctaid.{axis}": one(at) for axis, at in zip("xyz", index, strict=True)},
            **{f"%nctaid.{axis}": one(size) for axis, size in zip("xyz", grid, strict=True)},
        }  # fmt: skip

    def special(self, name: str) -> Threads:
        return self._special[name]

    def run(self) -> Iterator[None]:
        """Until all threads have ended. Yields where another program may go first.

        After a barrier some warps, chosen at random, go on only when the others wait at the next one.
        """
        now, late = 0, self._some_warps()
        while now >= 0:
            if late.any():
                self._at[:] = now
                now = yield from self._run_apart(late)
                late = self._no_warps
                continue
            one, run = self.kernel.instructions[now], self.steps[now]
            chosen = None if one.guard is None else self._chosen(one)
            some = chosen is None or bool(chosen.any())
            if chosen is not None and chosen.all():
                chosen = None
            if run is not None:
                if one.looks_at_others:
                    yield
                if some:
                    run(self, chosen)
                now += 1
            elif not some or one.name.startswith("bar.warp"):
                now += 1
            elif chosen is not None:
                self._part(one, chosen, now)
                now = yield from self._run_apart(self._no_warps)
            elif one.name.startswith("bra"):
                now = one.target
            elif one.name == "ret":
                return
            else:
                yield
                now, late = now + 1, self._some_warps()

    def _some_warps(self) -> NDArray[np.bool_]:
        return np.repeat([self._pick.random() < 0.3 for _ in range(self.num_threads // 32)], 32)

    def _chosen(self, one: Instruction) -> NDArray[np.bool_]:
        assert one.guard is not None
        return self.registers[one.guard[0].index] ^ one.guard[1]

    def _part(self, one: Instruction, chosen: NDArray[np.bool_], now: int) -> None:
        """Some threads branch."""
        assert one.name.startswith("bra"), one.text
        self._at[:] = np.where(chosen, one.target, now + 1)

    def _run_apart(self, late: NDArray[np.bool_]) -> Generator[None, None, int]:
        """Threads go their own ways until all are at one place, which is returned (-1: the end)."""
        at, waits, ended = self._at, np.zeros(self.num_threads, bool), np.zeros(self.num_threads, bool)
        while not ended.all():
            able = ~waits & ~ended
            if not able.any():  # all have come to the barrier
                assert len(set(at[waits])) == 1, "threads wait at different barriers"
                yield
                return int(at[waits][0]) + 1
            if (able & ~late).any():
                able &= ~late
            now = int(at[able].min())  # those who are behind go first: so lanes of a warp come together again
            mine = able & (at == now)
            if mine.all():
                return now
            one, run = self.kernel.instructions[now], self.steps[now]
            chosen = mine if one.guard is None else mine & self._chosen(one)
            if run is not None:
                if one.looks_at_others:
                    yield
                    late = mine  # others go first, who may be what it waits for
                if chosen.any():
                    run(self, chosen)
                at[mine] = now + 1
            elif one.name.startswith("bra"):
                at[mine] = np.where(chosen[mine], one.target, now + 1)
            elif one.name == "ret":
                ended |= chosen
                at[mine] = now + 1
            elif one.name.startswith("bar.warp"):
                assert (mine.reshape(-1, 32).any(1) == mine.reshape(-1, 32).all(1)).all(), "half of a warp is at its barrier"
                at[mine] = now + 1
            else:
                waits |= chosen
        return -1


def _is_control(one: Instruction) -> bool:
    return one.name.startswith(("bra", "bar.", "barrier.")) or one.name == "ret"


def run_grid(
    kernel: Kernel, params: Mapping[str, NDArray[np.uint64]], memory: Memory, shared_bytes: int, grid: Index, seed: int, lost: Counter[str]
) -> None:
    """All programs, taking turns in an order that `seed` decides, as are the warps that are late.

    lost: what accesses of lanes that meet in a bank of shared memory cost is added to it, by instruction.
    """
    pick = random.Random(seed)
    steps = [None if _is_control(one) else step(one) for one in kernel.instructions]
    every = product(*map(range, grid))
    running = [Program(kernel, steps, params, memory, shared_bytes, index, grid, pick, lost).run() for index in every]
    turns, stores = 0, 0
    while running:
        one = pick.choice(running)
        try:
            next(one)
        except StopIteration:
            running.remove(one)
            turns = 0
        turns, stores = (turns + 1, stores) if stores == memory.num_stores else (0, memory.num_stores)
        assert turns <= MOST_TURNS * max(1, len(running)), "all programs wait for each other"
