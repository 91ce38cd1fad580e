"""One line of the log every ten seconds while a model computes, with the logger `stoker.load`.

The values are differences between two statistics of the executor, whose step loop does nothing for them. Of several frontends, one writes
the lines: the one that holds a lock in the folder of the server. If it ends, another one gets the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from stoker.base.errors import StokerError
from stoker.base.logging import LogEvent, get_logger, log_event
from stoker.frontend.repository import ModelRepository
from stoker.runtime.request import ExecutorStats

log = get_logger("stoker.load")

INTERVAL_S = 10.0
LOCK = "summary.lock"
COUNTS = ("num_steps", "num_prefill_tokens", "num_decode_tokens", "num_reused_tokens", "num_preemptions")  # since the executor's start


class LoadEvent(LogEvent):
    """The values of one line: rates over the interval, and gauges at its end."""

    model: str
    interval_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # computed ones
    running: int
    waiting: int
    kv_usage: float  # fraction of the blocks that sequences use
    reuse: float  # fraction of the prompt tokens whose keys and values came from the cache
    preemptions: int

    def __str__(self) -> str:
        """The values as name=value."""
        return (
            f"model={self.model} output={self.output_tokens_per_s:.1f} tokens/s prompt={self.prompt_tokens_per_s:.1f} tokens/s "
            f"running={self.running} waiting={self.waiting} kv={self.kv_usage:.1%} reuse={self.reuse:.1%} preemptions={self.preemptions}"
        )


def load_event(model: str, before: ExecutorStats, now: ExecutorStats, interval_s: float) -> LoadEvent | None:
    """The line of the last interval. None if no step was computed in it.

    After a restart of the executor, the line has what the new one has computed.
    """
    if now.num_steps == before.num_steps:
        return None
    if any(getattr(now, name) < getattr(before, name) for name in COUNTS):
        before = ExecutorStats()
    reused = now.num_reused_tokens - before.num_reused_tokens
    computed = now.num_prefill_tokens - before.num_prefill_tokens
    return LoadEvent(
        model=model,
        interval_s=round(interval_s, 3),
        output_tokens_per_s=round((now.num_decode_tokens - before.num_decode_tokens) / interval_s, 1),
        prompt_tokens_per_s=round(computed / interval_s, 1),
        running=now.num_running,
        waiting=now.num_waiting,
        kv_usage=round((now.num_blocks - now.num_free_blocks) / max(1, now.num_blocks), 4),
        reuse=round(reused / max(1, reused + computed), 4),
        preemptions=now.num_preemptions - before.num_preemptions,
    )


class LoadLog:
    """Writes the lines of all models of a repository."""

    def __init__(self, repository: ModelRepository, folder: Path | None, interval_s: float = INTERVAL_S) -> None:
        self._repository = repository
        self._folder = folder  # of the lock; None: this is the only frontend
        self._interval_s = interval_s
        self._before: dict[str, tuple[float, ExecutorStats]] = {}
        self._lock: IO[Any] | None = None

    def start(self) -> Callable[[], None]:
        """Write lines from now on. Returns the function that stops it."""
        task = asyncio.create_task(self._run())

        def stop() -> None:
            """End the task and release the lock."""
            task.cancel()
            if self._lock is not None:
                self._lock.close()

        return stop

    async def _run(self) -> None:
        """Write the lines of each interval in which this process has the lock and the level is enabled."""
        while True:
            await asyncio.sleep(self._interval_s)
            if log.isEnabledFor(logging.INFO) and self._has_lock():
                await self.write()

    async def write(self) -> None:
        """Write the line of each model that has computed since the last call."""
        for model in self._repository.models():
            if model.service is None or not model.service.ready:
                self._before.pop(model.name, None)
                continue
            try:
                stats = await model.service.stats()
            except StokerError:  # the executor does not answer, which other lines report
                continue
            now, previous = time.monotonic(), self._before.get(model.name)
            self._before[model.name] = (now, stats)
            if previous is not None and (event := load_event(model.name, previous[1], stats, now - previous[0])) is not None:
                log_event(log, logging.INFO, event)

    def _has_lock(self) -> bool:
        """Whether this process has the lock. Gets it if no other process has it."""
        if self._folder is None or self._lock is not None:
            return True
        file = (self._folder / LOCK).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._lock = file
        return True
