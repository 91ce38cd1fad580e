"""`stoker triton identity`: batches of random tokens, timed; the output format of tensorrtllm_backend's identity_test.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import typer

from stoker.base.config import check_range
from stoker.base.errors import ConfigError, StokerError


def identity(
    batch_size: Annotated[int, typer.Option("--batch_size", "--batch-size", help="Rows of each request.")] = 8,
    start_len: Annotated[int, typer.Option("--start_len", "--start-len", help="Tokens of each prompt.")] = 8,
    output_len: Annotated[int, typer.Option("--output_len", "--output-len", help="New tokens of each row.")] = 10,
    num_runs: Annotated[int, typer.Option("--num_runs", "-n", help="Timed runs, after one warm-up run.")] = 1,
    beam_width: Annotated[int, typer.Option("--beam_width", "-beam", help="Beams of each row.")] = 1,
    top_k: Annotated[int, typer.Option("--topk", "-topk", help="The input runtime_top_k.")] = 1,
    top_p: Annotated[float, typer.Option("--topp", "-topp", help="The input runtime_top_p.")] = 0.0,
    mode: Annotated[str, typer.Option("--mode", "-m", help="sync: one run after another. async: all runs at once.")] = "sync",
    model_name: Annotated[str, typer.Option(help="The model that takes token ids.")] = "tensorrt_llm",
    vocab_size: Annotated[int, typer.Option(help="Random token ids are below this number.")] = 1000,
    url: Annotated[str, typer.Option("--url", "-u", help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
) -> None:
    """Send batches of random token ids to a Triton server and print latency and throughput.

    Examples:

      stoker triton identity --batch_size 8 --start_len 128 --output_len 20

      stoker triton identity --url gpu-host:8001 --num_runs 10 --mode async
    """
    from stoker.cli.clients.triton import check_address, check_server, import_tritonclient, infer, random_token_inputs

    if mode not in ("sync", "async"):
        raise ConfigError(f"--mode {mode} is refused.", cure="Use sync or async.")
    check_range("num_runs", num_runs, 1, 1 << 20)
    check_address(url)
    grpc = import_tritonclient("grpc")
    inputs = random_token_inputs(
        grpc, batch_size=batch_size, start_len=start_len, output_len=output_len, vocab_size=vocab_size, beam_width=beam_width,
        top_k=top_k, top_p=top_p,
    )  # fmt: skip
    with grpc.InferenceServerClient(url) as client:
        check_server(client, url, "grpc")
        _check_result(infer(client, model_name, inputs), batch_size, start_len, output_len)
        latency_s = _mean_run_s(partial(infer, client, model_name, inputs), num_runs, concurrent=mode == "async")
    typer.echo(f"[INFO] Batch size: {batch_size}, Start len: {start_len}, Output len: {output_len}")
    typer.echo(f"[INFO] Latency: {latency_s * 1e3:.3f} ms")
    typer.echo(f"[INFO] Throughput: {batch_size / latency_s:.3f} sentences / sec")


def _check_result(result: Any, batch_size: int, start_len: int, output_len: int) -> None:
    """Raise StokerError unless every row contains its prompt and at least one new token."""
    ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    if ids.shape[0] != batch_size or lengths.min() <= start_len or lengths.max() > start_len + output_len:
        raise StokerError(f"the answer has shape {list(ids.shape)} and lengths {lengths.min()} to {lengths.max()}.")


def _mean_run_s(run: Callable[[], object], num_runs: int, *, concurrent: bool) -> float:
    """The total time of `num_runs` calls of `run` in seconds, divided by their number. Raises the error of a failed call."""
    started = time.perf_counter()
    if concurrent:
        with ThreadPoolExecutor(num_runs) as pool:
            for run_result in [pool.submit(run) for _ in range(num_runs)]:
                run_result.result()
    else:
        for _ in range(num_runs):
            run()
    return (time.perf_counter() - started) / num_runs
