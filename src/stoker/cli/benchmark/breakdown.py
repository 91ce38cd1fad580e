"""`--breakdown` of the benchmarks: the GPU time of a step by kernel, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker.base.config import check_range
from stoker.base.errors import ConfigError
from stoker.cli.benchmark.executor import ExecutorBenchmark

if TYPE_CHECKING:
    from stoker.profiling.breakdown import Breakdown
    from stoker.runtime.executor import Executor

MAX_PRINTED_KERNELS = 16  # the JSON contains all kernels
NUM_STEPS = 24  # measured steps
NUM_SETTLING_STEPS = 8  # steps before the measurement, once the wanted state is reached


def check_gpu(benchmark: ExecutorBenchmark) -> None:
    """Raise ConfigError when the engine does not run on a GPU."""
    if benchmark.executor.info.device != "cuda":
        raise ConfigError("--breakdown measures a GPU, and this engine runs on the CPU.", cure="Leave it out.")


def decode_breakdown(benchmark: ExecutorBenchmark, batch: int, context: int) -> dict[str, Any]:
    """Break down steps in which all `batch` rows decode, after prompts of `context` tokens."""
    check_range("batch", batch, 1, benchmark.executor.stats.max_batch_size)
    # The first rows decode while the prompts of the last rows are prefilled, so answers must be that much longer.
    output_len = 2 * NUM_STEPS + NUM_SETTLING_STEPS + 8 + min_prefill_steps(benchmark.executor, batch * context)
    benchmark.submit(batch, context, output_len)
    stats, scheduler = benchmark.executor.stats, benchmark.executor.scheduler
    # With pipeline stages, one step contains only some of the rows; `num_running` counts all.
    return _break_down(benchmark, lambda: stats.last_step_prefill_tokens == 0 and scheduler.num_running == batch)


def load_breakdown(benchmark: ExecutorBenchmark, count: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Break down steps in the middle of a run at full load, in which prefills and decodes are mixed."""
    benchmark.submit(count, input_len, output_len)
    stats = benchmark.executor.stats
    half = stats.num_decode_tokens + count * output_len // 2
    return _break_down(benchmark, lambda: stats.num_decode_tokens >= half)


def min_prefill_steps(executor: Executor, num_tokens: int) -> int:
    """The minimum number of steps in which `num_tokens` prompt tokens are prefilled."""
    limits = executor.info.limits
    # Each step has room for the decodes of a full batch.
    per_step = (executor.config.max_num_tokens or limits.max_num_tokens) - (executor.config.max_batch_size or limits.max_batch_size)
    return -(-num_tokens // max(per_step, 1))


def _break_down(benchmark: ExecutorBenchmark, is_reached: Callable[[], bool]) -> dict[str, Any]:
    """Step until `is_reached`, break down the following steps, and print the table. Raises ConfigError if it is never reached."""
    from stoker.profiling.breakdown import break_down

    executor = benchmark.executor
    executor.turn(0.0)
    while not is_reached():
        if not executor.is_busy:
            raise ConfigError("the requests ended before the steps to measure.", cure="Use longer answers, or more requests.")
        executor.turn(0.0)
    for _ in range(NUM_SETTLING_STEPS):
        executor.turn(0.0)
    breakdown = break_down(executor, NUM_STEPS)
    benchmark.cancel_submitted()
    print_breakdown(breakdown)
    result: dict[str, Any] = msgspec.to_builtins(breakdown)
    return result


def print_breakdown(breakdown: Breakdown) -> None:
    """Print a breakdown as a table."""
    title = (
        f"{breakdown.num_steps} steps of {breakdown.rows:.0f} rows, {breakdown.tokens:.0f} tokens: {breakdown.step_ms:.3f} ms per step, "
        f"device idle {breakdown.gap_ms:.3f} ms ({breakdown.gap_share:.1%})"
    )
    table = Table(title=title, title_justify="left")
    for name in ("kernel", "launches", "µs", "µs per step", "share", "of the roofline"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for kernel in breakdown.kernels[:MAX_PRINTED_KERNELS]:
        roofline = "" if kernel.roofline is None else f"{kernel.roofline:.0%}"
        cells = (f"{kernel.count:.1f}", f"{kernel.mean_us:.2f}", f"{kernel.step_us:.1f}", f"{kernel.share:.1%}", roofline)
        table.add_row(escape(kernel.name), *cells)
    Console().print(table)
