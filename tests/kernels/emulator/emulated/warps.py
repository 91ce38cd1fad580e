"""Runs a CTA of a warp-specialized kernel warp by warp, in a random order: each warp until it waits.

Warps wait at numbered barriers of some threads (`bar.sync` and `barrier.sync`; `bar.arrive` does not wait), and for mbarriers, which they
poll. Branches are of whole warps. The history of global memory counts a barrier of some threads as one of the CTA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from emulated.operands import read

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emulated.parse import Instruction, Operand
    from emulated.program import Program

MAX_IDLE_TURNS = 4000  # turns of warps that only poll
PAUSE = 0.3  # the probability that a warp pauses after a barrier at which it does not wait


@dataclass(slots=True)
class _Barrier:
    """A numbered barrier: the threads that it waits for, those that have arrived, and the warps that wait."""

    count: int
    arrived: int = 0
    waiting: list[int] = field(default_factory=list)


class Warps:
    """The warps of a CTA: where each is, and what it waits for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.masks = [program.thread // 32 == warp for warp in range(program.num_threads // 32)]
        self.at = [0] * len(self.masks)
        self.runnable, self.ended = set(range(len(self.masks))), set[int]()
        self._barriers: dict[int, _Barrier] = {}

    def run(self) -> Iterator[None]:
        """Run until all warps have ended. Yields before atomic operations, where another CTA may run first."""
        idle_turns = 0
        while len(self.ended) < len(self.masks):
            assert self.runnable, f"all warps wait: {self._places()}"
            warp = self.program.generator.choice(sorted(self.runnable))
            has_progress = yield from self._run_warp(warp)
            idle_turns = 0 if has_progress else idle_turns + 1
            assert idle_turns <= MAX_IDLE_TURNS, f"all warps poll: {self._places()}"

    def _run_warp(self, warp: int) -> Iterator[None]:
        """Run one warp until it waits, ends, or polls an mbarrier in vain. Returns whether it did more than that."""
        program, has_progress = self.program, False
        instructions, steps, mask = program.kernel.instructions, program.steps, self.masks[warp]
        while warp in self.runnable:
            instruction, step = instructions[self.at[warp]], steps[self.at[warp]]
            self.at[warp] += 1
            enabled = mask
            if instruction.predicate is not None:
                enabled = mask & program.predicate_mask(instruction)
                if not np.count_nonzero(enabled):
                    continue
            if step is None:
                self._control(warp, instruction, enabled)
                has_progress |= not instruction.name.startswith(("bra", "brx"))
                if instruction.name == "bar.arrive" and program.generator.random() < PAUSE:
                    break
            elif not instruction.depends_on_others:
                step(program, enabled)
            else:
                if instruction.name.startswith("atom"):
                    yield
                step(program, enabled)
                if instruction.name.startswith("mbarrier.try_wait"):
                    if not self._has_passed(instruction, enabled):
                        break
                    has_progress = True
        return has_progress

    def _has_passed(self, instruction: Instruction, enabled: NDArray[np.bool_]) -> bool:
        return bool(read(instruction.operands[0], "pred")(self.program)[enabled].all())

    def _control(self, warp: int, instruction: Instruction, enabled: NDArray[np.bool_]) -> None:
        assert (enabled == self.masks[warp]).all(), f"a warp diverges: {instruction.text}"
        if instruction.name.startswith("bra"):
            self.at[warp] = instruction.target
        elif instruction.name.startswith("brx"):
            self.at[warp] = instruction.targets[self._number(warp, instruction.operands[0])]
        elif instruction.name == "ret":
            self.runnable.remove(warp)
            self.ended.add(warp)
        elif not instruction.name.startswith("bar.warp"):
            self._arrive(warp, instruction)

    def _arrive(self, warp: int, instruction: Instruction) -> None:
        """Arrive at the barrier with this number, and wait there unless the instruction is `bar.arrive`."""
        numbers = [self._number(warp, part) for part in instruction.operands]
        number, count = (*numbers, self.program.num_threads)[:2]
        barrier = self._barriers.setdefault(number, _Barrier(count))
        barrier.arrived += 32
        assert barrier.count == count and barrier.arrived <= count, f"barrier {number}: {instruction.text}"
        if instruction.name != "bar.arrive":
            self.runnable.remove(warp)
            barrier.waiting.append(warp)
        if barrier.arrived == count:
            self.runnable.update(barrier.waiting)
            del self._barriers[number]
            self.program.clock.cta_barrier()

    def _number(self, warp: int, operand: Operand) -> int:
        """The value of an operand in a warp's threads."""
        return int(np.broadcast_to(read(operand, "u32")(self.program), len(self.masks) * 32)[32 * warp])

    def _places(self) -> list[str]:
        return [self.program.kernel.instructions[at - 1].text for at in self.at]
