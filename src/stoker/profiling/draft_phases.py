"""The phases of steps with speculative decoding, measured around the calls of an executor on this thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from stoker.runtime.executor import Executor
from stoker.runtime.request import ExecutorStats


@dataclass(slots=True)
class DraftPhases:
    """Times in seconds, and the counts of the executor before and after."""

    plan_s: float = 0.0  # planning and committing, in which proposers on the host find drafts
    draft_s: float = 0.0  # the drafter, except in captured steps on a GPU, where it is a part of the verification
    total_s: float = 0.0
    before: ExecutorStats | None = None
    after: ExecutorStats | None = None

    def per_step(self) -> dict[str, float]:
        """Milliseconds of each phase per step, the accepted drafts of a row per step, and the share of drafts that were accepted.

        The verification is the rest of the time: the model and the sampler.
        """
        assert self.before is not None and self.after is not None
        steps = max(self.after.num_steps - self.before.num_steps, 1)
        rows = max(self.after.num_draft_steps - self.before.num_draft_steps, 1)
        drafts = max(self.after.num_draft_tokens - self.before.num_draft_tokens, 1)
        accepted = self.after.num_accepted_draft_tokens - self.before.num_accepted_draft_tokens
        return {
            "plan ms": self.plan_s / steps * 1e3,
            "draft ms": self.draft_s / steps * 1e3,
            "verify ms": (self.total_s - self.plan_s - self.draft_s) / steps * 1e3,
            "accepted/step": accepted / rows,
            "acceptance": accepted / drafts,
        }


@contextmanager
def draft_phases(executor: Executor) -> Iterator[DraftPhases]:
    """Measure the phases of all steps in the block."""
    phases = DraftPhases(before=executor.snapshot())
    draft_runner = getattr(executor.runner, "draft_runner", None)
    started = time.perf_counter()
    with ExitStack() as stack:
        for owner, method, phase in (
            (executor.scheduler, "plan", "plan_s"),
            (executor.scheduler, "commit", "plan_s"),
            (draft_runner, "run", "draft_s"),
        ):
            if owner is not None:
                stack.enter_context(_timed(owner, method, phases, phase))
        yield phases
    phases.total_s = time.perf_counter() - started
    phases.after = executor.snapshot()


@contextmanager
def _timed(owner: object, method: str, phases: DraftPhases, phase: str) -> Iterator[None]:
    """Add the time of all calls of a method of `owner` to a phase."""
    original: Callable[..., Any] = getattr(owner, method)

    def timed(*args: Any, **values: Any) -> Any:
        """Call the method and measure it."""
        started = time.perf_counter()
        try:
            return original(*args, **values)
        finally:
            setattr(phases, phase, getattr(phases, phase) + time.perf_counter() - started)

    setattr(owner, method, timed)
    try:
        yield
    finally:
        delattr(owner, method)  # the method of the class is visible again
