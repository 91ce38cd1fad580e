"""`stoker bench latency`: the time of a first token and of a decode step."""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.config import RuntimeConfig, check_range
from stoker.cli.bench.breakdown import check_device, of_decodes
from stoker.cli.bench.load import Bench, with_bar
from stoker.cli.bench.report import check_out, origin, percentile, show
from stoker.cli.options import runtime_options

SHORT = 4  # output tokens of the run that is subtracted


@runtime_options
def latency(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    batch: Annotated[list[int], typer.Option(help="Sequences at once. May be repeated.")] = [1, 8],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="Prompt tokens of each. May be repeated.")] = [128],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 32,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also each kernel's share of a step, and the device's idle time. GPU.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    *,
    runtime: RuntimeConfig,
) -> None:
    """Time to first token, and time of a decode step, by batch size and context length.

    A step's time is the difference of two runs that differ in the number of steps only, so prefill cancels out.

    Example:

      stoker bench latency engine --batch 1 --batch 8 --context 128 --context 1024 --json latency.json
    """
    check_range("steps", steps, 4, 1 << 20)
    check_out(json)
    bench = Bench(engine, runtime)
    if breakdown:
        check_device(bench)
    rows = with_bar("latency", [partial(_row, bench, b, c, steps) for b, c in itertools.product(batch, context)])
    about = {**origin(engine, bench.executor.info.device), "steps": steps}
    if breakdown:
        found = [{"batch": b, "context": c, **of_decodes(bench, b, c)} for b, c in itertools.product(batch, context)]
        about["breakdown"] = found
    show(f"latency, {steps} decode steps", rows, {**about, **bench.kernels}, json)


def _row(bench: Bench, batch: int, context: int, steps: int) -> dict[str, Any]:
    first = statistics.median(max(bench.run(batch, context, 1).first_token_s) for _ in range(3))
    short, long = bench.run(batch, context, SHORT), bench.run(batch, context, SHORT + steps)
    step_s = (long.total_s - short.total_s) / steps
    turns = long.turns_s[-(steps - 1) :]  # the last steps: all rows decode
    return {
        "batch": batch,
        "context": context,
        "first token ms": first * 1e3,
        "step ms": step_s * 1e3,
        "step p50 ms": percentile(turns, 50) * 1e3,
        "step p99 ms": percentile(turns, 99) * 1e3,
        "tokens/s": batch / step_s,
    }
