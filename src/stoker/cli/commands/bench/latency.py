"""`stoker bench latency`: time to first token and decode step time."""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.config import RuntimeConfig, check_range
from stoker.cli.benchmark.breakdown import check_gpu, decode_breakdown
from stoker.cli.benchmark.executor import ExecutorBenchmark, run_with_progress
from stoker.cli.benchmark.results import check_output_file, percentile, print_results, provenance
from stoker.cli.engines import Model, loading
from stoker.cli.options import build_options, runtime_options
from stoker.deploy.build_settings import BuildSettings

SHORT_OUTPUT_LEN = 4  # new tokens of the run that is subtracted
NUM_FIRST_TOKEN_RUNS = 3


@build_options
@runtime_options
def latency(
    model: Model,
    batch: Annotated[list[int], typer.Option(help="Number of concurrent sequences. Repeatable.")] = [1, 8],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="Prompt tokens of each sequence. Repeatable.")] = [128],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Number of decode steps that are timed.")] = 32,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also measure each kernel's share of a step and the device's idle time. GPU only.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    *,
    runtime: RuntimeConfig,
    build: BuildSettings,
) -> None:
    """Measure time to first token and decode step time, by batch size and context length.

    Step time is the difference of two runs that differ only in their number of new tokens, so prefill time cancels out. With --speculate it
    is the time per token of a sequence, and the phases of a step follow: planning, drafting and verification.

    Examples:

      stoker bench latency engine

      stoker bench latency engine --batch 1 --batch 8 --context 128 --context 1024

      stoker bench latency engine --breakdown --json latency.json
    """
    check_range("steps", steps, 4, 1 << 20)
    check_output_file(json)
    with loading(model, runtime, build) as engine:
        benchmark = ExecutorBenchmark(engine, runtime)
    for size in batch:
        check_range("batch", size, 1, benchmark.executor.stats.max_batch_size)
    for length in context:
        check_range("context", length, 1, benchmark.executor.info.limits.max_input_len)
    if breakdown:
        check_gpu(benchmark)
    cases = list(itertools.product(batch, context))
    rows = run_with_progress("latency", [partial(measure, benchmark, b, c, steps) for b, c in cases])
    about = {**provenance(engine, benchmark.executor.info.device), "steps": steps}
    if breakdown:
        about["breakdown"] = [{"batch": b, "context": c, **decode_breakdown(benchmark, b, c)} for b, c in cases]
    print_results(f"latency, {steps} decode steps", rows, {**about, **benchmark.kernel_counts}, json)


def measure(benchmark: ExecutorBenchmark, batch: int, context: int, steps: int) -> dict[str, Any]:
    """One row of results for a batch size and context length, with the phases of steps if there are drafts."""
    from stoker.profiling.draft_phases import draft_phases

    first_s = statistics.median(max(benchmark.run(batch, context, 1).first_token_s) for _ in range(NUM_FIRST_TOKEN_RUNS))
    short = benchmark.run(batch, context, SHORT_OUTPUT_LEN)
    with draft_phases(benchmark.executor) as phases:
        long = benchmark.run(batch, context, SHORT_OUTPUT_LEN + steps)
    step_s = (long.total_s - short.total_s) / steps
    decode_steps_s = long.turns_s[-(steps - 1) :]  # in the last steps, all rows decode
    return {
        "batch": batch,
        "context": context,
        "first token ms": first_s * 1e3,
        "step ms": step_s * 1e3,
        "step p50 ms": percentile(decode_steps_s, 50) * 1e3,
        "step p99 ms": percentile(decode_steps_s, 99) * 1e3,
        "tokens/s": batch / step_s,
        **(phases.per_step() if benchmark.executor.stats.proposer != "none" else {}),
    }
