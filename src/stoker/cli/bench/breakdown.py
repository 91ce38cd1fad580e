"""`--breakdown` of the benchmarks: where the device's time goes, as a table and in the JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker.base.config import check_range
from stoker.base.errors import ConfigError
from stoker.cli.bench.load import Bench

if TYPE_CHECKING:
    from stoker.profiling.breakdown import Breakdown
    from stoker.runtime.executor import Executor

SHOWN = 16  # kernels of a table; the JSON has all
STEPS = 24
SETTLING = 8  # steps after the prompts are done, or after a throughput run's begin


def check_device(bench: Bench) -> None:
    """Raise ConfigError where there is no GPU to look at."""
    if bench.executor.info.device != "cuda":
        raise ConfigError("--breakdown looks at a GPU, and this engine runs on the CPU.", cure="Leave it out.")


def of_decodes(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    """Steps of `batch` rows that all decode after `context` prompt tokens."""
    check_range("batch", batch, 1, bench.executor.stats.max_batch_size)
    # The first rows decode while the last ones' prompts are computed.
    bench.submit(batch, context, 2 * STEPS + SETTLING + 8 + prompt_steps(bench.executor, batch * context))
    stats, scheduler = bench.executor.stats, bench.executor.scheduler
    # With pipeline stages, a step has some of the rows.
    return _break_down(bench, lambda: stats.last_step_prefill_tokens == 0 and scheduler.num_running == batch)


def prompt_steps(executor: Executor, num_tokens: int) -> int:
    """Steps that prompts of so many tokens take, at least."""
    limits = executor.info.limits
    most = (executor.config.max_num_tokens or limits.max_num_tokens) - (executor.config.max_batch_size or limits.max_batch_size)
    return -(-num_tokens // max(most, 1))


def of_load(bench: Bench, count: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Steps in the middle of a run at maximum load: prompts and decodes together."""
    bench.submit(count, input_len, output_len)
    stats = bench.executor.stats
    half = stats.num_decode_tokens + count * output_len // 2
    return _break_down(bench, lambda: stats.num_decode_tokens >= half)


def _break_down(bench: Bench, is_there: Callable[[], bool]) -> dict[str, Any]:
    from stoker.profiling.breakdown import break_down

    bench.executor.turn(0.0)
    while not is_there():
        if not bench.executor.is_busy:
            raise ConfigError("the requests ended before the steps to look at.", cure="Use longer answers, or more requests.")
        bench.executor.turn(0.0)
    for _ in range(SETTLING):
        bench.executor.turn(0.0)
    found = break_down(bench.executor, STEPS)
    bench.finish()
    show(found)
    return msgspec.to_builtins(found)


def show(found: Breakdown) -> None:
    """Print the breakdown as a table."""
    title = (
        f"{found.num_steps} steps of {found.rows:.0f} rows, {found.tokens:.0f} tokens: {found.step_ms:.3f} ms a step, "
        f"device idle {found.gap_ms:.3f} ms ({found.gap_share:.1%})"
    )
    table = Table(title=title, title_justify="left")
    for name in ("kernel", "launches", "µs", "µs a step", "share", "of the roofline"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for kernel in found.kernels[:SHOWN]:
        near = "" if kernel.roofline is None else f"{kernel.roofline:.0%}"
        table.add_row(
            escape(kernel.name), f"{kernel.count:.1f}", f"{kernel.mean_us:.2f}", f"{kernel.step_us:.1f}", f"{kernel.share:.1%}", near
        )
    Console().print(table)
