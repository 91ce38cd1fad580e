"""`stoker bench throughput`: tokens per second of many concurrent requests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.config import RuntimeConfig
from stoker.cli.benchmark.breakdown import check_gpu, load_breakdown
from stoker.cli.benchmark.executor import ExecutorBenchmark, run_with_progress
from stoker.cli.benchmark.results import check_output_file, percentile, print_results, provenance
from stoker.cli.engines import Model, loading
from stoker.cli.options import build_options, runtime_options
from stoker.deploy.build_settings import BuildSettings


@build_options
@runtime_options
def throughput(
    model: Model,
    requests: Annotated[list[int], typer.Option(help="Number of requests, submitted at once. Repeatable.")] = [16],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each request; none ends earlier.")] = 128,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also measure each kernel's share of a step and the device's idle time. GPU only.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    *,
    runtime: RuntimeConfig,
    build: BuildSettings,
) -> None:
    """Measure tokens per second when many requests are submitted at once, without a server.

    Examples:

      stoker bench throughput engine

      stoker bench throughput engine --input-len 128 --output-len 128 --requests 64

      stoker bench throughput engine --requests 16 --requests 256 --json throughput.json
    """
    check_output_file(json)
    with loading(model, runtime, build) as engine:
        benchmark = ExecutorBenchmark(engine, runtime)
    if breakdown:
        check_gpu(benchmark)
    rows = run_with_progress("throughput", [partial(_measure, benchmark, count, input_len, output_len) for count in requests])
    about = {**provenance(engine, benchmark.executor.info.device), "input_len": input_len, "output_len": output_len}
    if breakdown:
        about["breakdown"] = [{"requests": count, **load_breakdown(benchmark, count, input_len, output_len)} for count in requests]
    print_results(f"throughput, {input_len} tokens in, {output_len} out", rows, {**about, **benchmark.kernel_counts}, json)


def _measure(benchmark: ExecutorBenchmark, count: int, input_len: int, output_len: int) -> dict[str, Any]:
    """One row of results for `count` concurrent requests."""
    before = benchmark.executor.snapshot()
    run = benchmark.run(count, input_len, output_len)
    after = benchmark.executor.snapshot()
    return {
        "requests": count,
        "total s": run.total_s,
        "output tokens/s": run.output_tokens_per_s,
        "all tokens/s": count * (input_len + output_len) / run.total_s,
        "first token p50 ms": percentile(run.first_token_s, 50) * 1e3,
        "first token p99 ms": percentile(run.first_token_s, 99) * 1e3,
        "rows a step": (after.row_steps - before.row_steps) / (after.num_steps - before.num_steps),
        "preemptions": after.num_preemptions - before.num_preemptions,
    }
