"""An executor that a benchmark steps on its own thread, without tokenization and without other threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from stoker.api.progress import ProgressBars
from stoker.base.config import RuntimeConfig, check_range
from stoker.base.errors import ConfigError
from stoker.base.process import freeze_objects
from stoker.runtime.expected_devices import expected_devices
from stoker.runtime.worker_group.follower_process import WaitingFollowers

if TYPE_CHECKING:
    from stoker.profiling.batch_run import BatchRun
    from stoker.runtime.executor import Executor
    from stoker.runtime.request import TokenRequest

WARM_UP = (8, 32, 8)  # requests, prompt tokens and new tokens of the run that is not measured
MAX_REQUESTS = 1 << 20


class ExecutorBenchmark:
    """Loads an engine and runs batches of random prompts on it. No two batches have the same prompts, so no prefix is reused."""

    def __init__(self, engine: Path, runtime: RuntimeConfig) -> None:
        with WaitingFollowers(expected_devices(engine, runtime)[1:]) as waiting:  # which import torch while this process does
            from stoker.profiling.mailbox import SynchronousMailbox
            from stoker.runtime.load import load_executor

            runtime = msgspec.structs.replace(runtime, max_queue_size=max(runtime.max_queue_size, MAX_REQUESTS))
            self.executor: Executor = load_executor(engine, runtime, SynchronousMailbox, waiting=waiting)
        self.executor.capture_all()
        assert isinstance(self.executor.mailbox, SynchronousMailbox)
        self._mailbox = self.executor.mailbox
        self._submitted: list[str] = []
        self._seeds = itertools.count(1)
        count, input_len, output_len = WARM_UP
        self.run(min(count, self.executor.stats.max_batch_size), input_len, output_len)
        freeze_objects()  # as the executor of a server does

    def run(self, count: int, input_len: int, output_len: int) -> BatchRun:
        """Run `count` requests, submitted at once, and return their times. Raises ConfigError when they exceed the engine's limits."""
        from stoker.profiling import batch_run

        return batch_run.run_batch(self.executor, self._random_requests(count, input_len, output_len), output_len)

    def submit(self, count: int, input_len: int, output_len: int) -> None:
        """Submit `count` requests. The caller then steps the executor, and calls `cancel_submitted` at the end. Raises ConfigError."""
        requests = self._random_requests(count, input_len, output_len)
        self._submitted = [request.request_id for request in requests]
        self._mailbox.submit(requests)

    def cancel_submitted(self) -> None:
        """Cancel the submitted requests and step until the executor is idle."""
        from stoker.runtime.client import Cancel

        self._mailbox.messages += [Cancel(request_id) for request_id in self._submitted]
        self._submitted = []
        self.executor.turn(0.0)
        while self.executor.is_busy:
            self.executor.turn(0.0)
        self._mailbox.pop_outputs()

    @property
    def kernel_counts(self) -> dict[str, Any]:
        """The number of Triton kernels that this process found in the cache, and that it compiled. Empty on a CPU."""
        if self.executor.info.device != "cuda":
            return {}
        from stoker.kernels.triton.aot.kernel_cache import counts

        return {"kernels": {"cached": counts.cached, "compiled": counts.compiled, "compile s": counts.compile_s}}

    def _random_requests(self, count: int, input_len: int, output_len: int) -> list[TokenRequest]:
        """`count` requests with new random prompts. Raises ConfigError when they exceed the engine's limits."""
        from stoker.profiling import batch_run

        info = self.executor.info
        check_range("requests", count, 1, MAX_REQUESTS)
        check_range("input_len", input_len, 1, info.limits.max_input_len)
        check_range("output_len", output_len, 1, info.limits.max_output_len)
        if input_len + output_len > info.max_seq_len:
            message = f"input_len={input_len} and output_len={output_len} exceed the engine's sequence length of {info.max_seq_len}."
            raise ConfigError(message, cure="Use shorter prompts or answers.")
        return batch_run.random_requests(count, input_len, output_len, info.vocab_size, seed=next(self._seeds))


def run_with_progress(stage: str, jobs: list[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Run the jobs one after another with a progress bar on stderr, and return their results."""
    with ProgressBars(Console(stderr=True)) as bars:
        results = []
        bars(stage, 0, len(jobs))
        for job in jobs:
            results.append(job())
            bars(stage, len(results), len(jobs))
    return results
