"""`stoker bench throughput`: tokens a second of many requests at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.config import RuntimeConfig
from stoker.cli.bench.breakdown import check_device, of_load
from stoker.cli.bench.load import Bench, with_bar
from stoker.cli.bench.report import check_out, origin, percentile, show
from stoker.cli.options import runtime_options


@runtime_options
def throughput(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    requests: Annotated[list[int], typer.Option(help="Requests, all at once. May be repeated.")] = [16],  # noqa: B006
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each; none ends earlier.")] = 128,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also each kernel's share of a step, and the device's idle time. GPU.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    *,
    runtime: RuntimeConfig,
) -> None:
    """Tokens a second when so many requests come at once, batched in flight on the calling thread.

    Example:

      stoker bench throughput engine --requests 64 --input-len 128 --output-len 128 --json throughput.json
    """
    check_out(json)
    bench = Bench(engine, runtime)
    if breakdown:
        check_device(bench)
    rows = with_bar("throughput", [partial(_row, bench, count, input_len, output_len) for count in requests])
    about = {**origin(engine, bench.executor.info.device), "input_len": input_len, "output_len": output_len}
    if breakdown:
        about["breakdown"] = [{"requests": count, **of_load(bench, count, input_len, output_len)} for count in requests]
    show(f"throughput, {input_len} tokens in, {output_len} out", rows, {**about, **bench.kernels}, json)


def _row(bench: Bench, count: int, input_len: int, output_len: int) -> dict[str, Any]:
    before = bench.executor.snapshot()
    run = bench.run(count, input_len, output_len)
    after = bench.executor.snapshot()
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
