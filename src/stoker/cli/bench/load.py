"""An executor that a benchmark turns by itself: nothing is tokenized, and no thread competes with the step loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from stoker.base.config import RuntimeConfig, check_range
from stoker.base.errors import ConfigError
from stoker.cli.progress import Bars

if TYPE_CHECKING:
    from stoker.profiling.batch_run import BatchRun
    from stoker.runtime.executor import Executor
    from stoker.runtime.request import TokenRequest

WARM_UP = (8, 32, 8)


class Bench:
    """Runs batches of random prompts on one executor; each call uses prompts that were not there before."""

    def __init__(self, engine: Path, runtime: RuntimeConfig) -> None:
        from stoker.profiling.mailbox import SynchronousMailbox
        from stoker.runtime.load import load_executor

        runtime = msgspec.structs.replace(runtime, max_queue_size=max(runtime.max_queue_size, 1 << 20))
        self.executor: Executor = load_executor(engine, runtime, SynchronousMailbox)
        assert isinstance(self.executor.mailbox, SynchronousMailbox)
        self._mailbox = self.executor.mailbox
        self._open: list[str] = []
        self._seeds = itertools.count(1)
        count, input_len, output_len = WARM_UP
        self.run(min(count, self.executor.stats.max_batch_size), input_len, output_len)

    def run(self, count: int, input_len: int, output_len: int) -> BatchRun:
        """`count` requests at once. Raises ConfigError when they don't fit the engine."""
        from stoker.profiling import batch_run

        return batch_run.run_batch(self.executor, self._requests(count, input_len, output_len), output_len)

    def submit(self, count: int, input_len: int, output_len: int) -> None:
        """The same, to be turned by the caller. Raises ConfigError as `run` does."""
        requests = self._requests(count, input_len, output_len)
        self._open = [request.request_id for request in requests]
        self._mailbox.submit(requests)

    def finish(self) -> None:
        """Cancel what was submitted, and wait until it is gone."""
        from stoker.runtime.client import Cancel

        self._mailbox.messages += [Cancel(request_id) for request_id in self._open]
        self._open = []
        self.executor.turn(0.0)
        while self.executor.is_busy:
            self.executor.turn(0.0)
        self._mailbox.take()

    @property
    def kernels(self) -> dict[str, Any]:
        """Triton kernels that this process loaded: found in the cache, or compiled."""
        if self.executor.info.device != "cuda":
            return {}
        from stoker.kernels.triton.aot.kernel_cache import counts

        return {"kernels": {"cached": counts.cached, "compiled": counts.compiled, "compile s": counts.compile_s}}

    def _requests(self, count: int, input_len: int, output_len: int) -> list[TokenRequest]:
        from stoker.profiling import batch_run

        info = self.executor.info
        check_range("requests", count, 1, 1 << 20)
        check_range("input_len", input_len, 1, info.limits.max_input_len)
        check_range("output_len", output_len, 1, info.limits.max_output_len)
        if input_len + output_len > info.max_seq_len:
            raise ConfigError(f"{input_len} + {output_len} tokens are more than a sequence's {info.max_seq_len}.", cure="Ask for fewer.")
        return batch_run.random_requests(count, input_len, output_len, info.vocab_size, seed=next(self._seeds))


def with_bar(what: str, jobs: list[Callable[[], dict]]) -> list[dict]:
    """The jobs' results, in order, with a progress bar on stderr."""
    with Bars(Console(stderr=True)) as bars:
        results = []
        bars(what, 0, len(jobs))
        for job in jobs:
            results.append(job())
            bars(what, len(results), len(jobs))
    return results
