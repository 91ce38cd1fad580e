"""`stoker triton sweep`: throughput and latency at a range of concurrencies, printed as perf_analyzer prints them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from stoker.base.errors import ConfigError, StokerError

MAX_CONCURRENCY = 4096


def sweep(
    concurrency_range: Annotated[str, typer.Option(help="start:end:step, as in perf_analyzer.")] = "1:10:2",
    model_name: Annotated[str, typer.Option("--model-name", "-m", help="The model that takes token ids.")] = "tensorrt_llm",
    batch_size: Annotated[int, typer.Option("--batch_size", "-b", help="Rows of each request.")] = 8,
    start_len: Annotated[int, typer.Option("--start_len", "--start-len", help="Tokens of each prompt.")] = 8,
    output_len: Annotated[int, typer.Option("--output_len", "--output-len", help="New tokens of each row.")] = 10,
    seconds: Annotated[float, typer.Option(help="Duration of the measurement at each concurrency.")] = 5.0,
    vocab_size: Annotated[int, typer.Option(help="Random token ids are below this number.")] = 1000,
    url: Annotated[str, typer.Option("--url", "-u", help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
) -> None:
    """Measure a Triton server at several concurrencies and print one line for each, in the format of perf_analyzer.

    At concurrency N, N requests are in flight all the time.

    Examples:

      stoker triton sweep --concurrency-range 1:10:2

      stoker triton sweep --concurrency-range 8 --batch_size 1 --seconds 30
    """
    from stoker.cli.clients.triton import check_address, check_server, import_tritonclient, infer, random_token_inputs

    if not 0 < seconds <= 86400:
        raise ConfigError(f"--seconds {seconds} is refused.", cure="Use seconds, above 0 and at most 86400.")
    levels = _parse_range(concurrency_range)
    check_address(url)
    grpc = import_tritonclient("grpc")
    inputs = random_token_inputs(grpc, batch_size=batch_size, start_len=start_len, output_len=output_len, vocab_size=vocab_size)
    for concurrency in levels:
        with grpc.InferenceServerClient(url) as client:
            check_server(client, url, "grpc")
            infer(client, model_name, inputs)  # warm-up
            rate, latency_s = _measure(partial(infer, client, model_name, inputs), concurrency, seconds)
        typer.echo(f"Concurrency: {concurrency}, throughput: {rate * batch_size:.4f} infer/sec, latency {latency_s * 1e6:.0f} usec")


def _parse_range(text: str) -> range:
    """The concurrency levels in text such as "1:10:2" or "8", where the end is included. Raises ConfigError."""
    try:
        start, end, step = [int(part) for part in text.split(":")] if text.count(":") == 2 else [int(text), int(text), 1]
        levels = range(start, end + 1, step)
    except ValueError:
        levels = range(0)
    if not levels or levels.start < 1 or levels[-1] > MAX_CONCURRENCY:
        cure = f"Write start:end:step, such as 1:10:2, from 1 to {MAX_CONCURRENCY}."
        raise ConfigError(f"--concurrency-range {text!r} is refused.", cure=cure)
    return levels


def _measure(request: Callable[[], object], concurrency: int, seconds: float) -> tuple[float, float]:
    """(requests per second, mean latency in seconds) of `concurrency` threads that repeat `request`. Raises StokerError if one fails."""
    latencies_s: list[float] = []
    errors: list[StokerError] = []
    deadline = time.perf_counter() + seconds

    def repeat() -> None:
        """Repeat the request until the deadline, in one thread."""
        try:
            while (started := time.perf_counter()) < deadline:
                request()
                latencies_s.append(time.perf_counter() - started)
        except StokerError as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(latencies_s) / (time.perf_counter() - started), statistics.mean(latencies_s)
