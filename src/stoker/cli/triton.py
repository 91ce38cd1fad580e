"""`stoker triton`: repositories checked and filled; the identity test, input data and a concurrency sweep."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from stoker.base.config import check_range
from stoker.base.errors import ConfigError, StokerError
from stoker.cli.command import Command

COMMANDS = (
    Command("lint", "stoker.cli.triton:lint", "List unfilled, unknown and near-miss keys.", "stoker triton lint repo"),
    Command(
        "fill", "stoker.cli.triton:fill", "Fill a template, as fill_template.py does.",
        'stoker triton fill -i repo/tensorrt_llm/config.pbtxt "engine_dir:engine,decoupled_mode:true"',
    ),
    Command(
        "identity", "stoker.cli.triton:identity", "One batch of random tokens: latency and sentences a second.",
        "stoker triton identity --batch_size 8 --start_len 128 --output_len 20",
    ),
    Command("input-data", "stoker.cli.triton:input_data", "Write input_data.json for perf_analyzer.", "stoker triton input-data"),
    Command("sweep", "stoker.cli.triton:sweep", "infer/s and latency by concurrency.", "stoker triton sweep --concurrency-range 1:10:2"),
)  # fmt: skip

FIRST_ID = 3  # ids below it are special in most vocabularies
Url = Annotated[str, typer.Option("--url", "-u", help="host:port of gRPC.")]


def lint(repository: Annotated[Path, typer.Argument(help="A model repository.")]) -> None:
    """Every finding on a line; the status is 1 when one is an error."""
    from stoker.deploy.triton.lint import lint as check

    findings = check(repository)
    for finding in findings:
        typer.echo(finding)
    raise typer.Exit(any(finding.severity == "error" for finding in findings))


def fill(
    file: Annotated[Path, typer.Argument(help="A config.pbtxt.")],
    substitutions: Annotated[str, typer.Argument(help="name:value,name:value")],
    in_place: Annotated[bool, typer.Option("--in_place", "-i", help="Change the file; otherwise the result is printed.")] = False,
) -> None:
    """Replace ${name} by its value. Names that are not given stay."""
    from stoker.deploy.triton.fill import fill as filled

    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", cure="Name a config.pbtxt.") from None
    text = filled(template, substitutions)
    if in_place:
        file.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)


def identity(
    batch_size: Annotated[int, typer.Option("--batch_size", "--batch-size", help="Rows of each request.")] = 8,
    start_len: Annotated[int, typer.Option("--start_len", "--start-len", help="Tokens of each prompt.")] = 8,
    output_len: Annotated[int, typer.Option("--output_len", "--output-len", help="New tokens of each.")] = 10,
    num_runs: Annotated[int, typer.Option("--num_runs", "-n", help="Runs that are timed, after one that is not.")] = 1,
    beam_width: Annotated[int, typer.Option("--beam_width", "-beam", help="Beams of each row.")] = 1,
    top_k: Annotated[int, typer.Option("--topk", "-topk", help="runtime_top_k.")] = 1,
    top_p: Annotated[float, typer.Option("--topp", "-topp", help="runtime_top_p.")] = 0.0,
    mode: Annotated[str, typer.Option("--mode", "-m", help="sync: one after another; async: all runs at once.")] = "sync",
    model_name: Annotated[str, typer.Option(help="The model of token ids.")] = "tensorrt_llm",
    vocab_size: Annotated[int, typer.Option(help="Random ids stay below it.")] = 1000,
    url: Url = "localhost:8001",
) -> None:
    """Send batches of random token ids to the model of token ids and time them."""
    from stoker.cli.triton_client import module

    if mode not in ("sync", "async"):
        raise ConfigError(f"--mode {mode} is refused.", cure="Use sync or async.")
    check_range("num_runs", num_runs, 1, 1 << 20)
    grpc = module("grpc")
    inputs = _batch(grpc, batch_size, start_len, output_len, vocab_size, beam_width, top_k, top_p)
    with grpc.InferenceServerClient(url) as client:
        done = _infer(client, model_name, inputs)
        _check_shape(done, batch_size, start_len, output_len)
        latency = _timed(client, model_name, inputs, num_runs, together=mode == "async")
    typer.echo(f"[INFO] Batch size: {batch_size}, Start len: {start_len}, Output len: {output_len}")
    typer.echo(f"[INFO] Latency: {latency * 1e3:.3f} ms")
    typer.echo(f"[INFO] Throughput: {batch_size / latency:.3f} sentences / sec")


def _batch(grpc: Any, rows: int, start_len: int, output_len: int, vocab: int, beams: int, top_k: int, top_p: float) -> list[Any]:
    _check_shapes(start_len, output_len, vocab, batch_size=rows)
    column = lambda value, dtype: np.full((rows, 1), value, dtype)  # noqa: E731
    arrays = {
        "input_ids": np.random.default_rng(0).integers(FIRST_ID, vocab, (rows, start_len), np.int32),
        "input_lengths": column(start_len, np.int32), "request_output_len": column(output_len, np.int32),
        "end_id": column(2, np.int32), "pad_id": column(0, np.int32), "runtime_top_k": column(top_k, np.int32),
        "runtime_top_p": column(top_p, np.float32), "beam_width": column(beams, np.int32),
    }  # fmt: skip
    made = []
    for name, array in arrays.items():
        made.append(grpc.InferInput(name, list(array.shape), "FP32" if array.dtype == np.float32 else "INT32"))
        made[-1].set_data_from_numpy(array)
    return made


def _check_shapes(start_len: int, output_len: int, vocab: int, **count: int) -> None:
    """Raise ConfigError for random requests that cannot be made."""
    for name, value in {**count, "start_len": start_len, "output_len": output_len}.items():
        check_range(name, value, 1, 1 << 20)
    check_range("vocab_size", vocab, FIRST_ID + 1, 1 << 31)


def _infer(client: Any, model: str, inputs: list[Any]) -> Any:
    from tritonclient.utils import InferenceServerException

    try:
        return client.infer(model, inputs)
    except InferenceServerException as error:
        raise StokerError(f"the server answered: {error.message()}") from None


def _check_shape(done: Any, rows: int, start_len: int, output_len: int) -> None:
    """Every row begins with its prompt and has new tokens behind it."""
    ids, lengths = done.as_numpy("output_ids"), done.as_numpy("sequence_length")
    if ids.shape[0] != rows or lengths.min() <= start_len or lengths.max() > start_len + output_len:
        raise StokerError(f"the answer has shape {list(ids.shape)} and lengths {lengths.min()} to {lengths.max()}.")


def _timed(client: Any, model: str, inputs: list[Any], runs: int, *, together: bool) -> float:
    """Seconds of a run, on the average."""
    started = time.perf_counter()
    if together:
        threads = [threading.Thread(target=_infer, args=(client, model, inputs)) for _ in range(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for _ in range(runs):
            _infer(client, model, inputs)
    return (time.perf_counter() - started) / runs


def input_data(
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("input_data.json"),
    requests: Annotated[int, typer.Option(help="Different requests.")] = 10,
    start_len: Annotated[int, typer.Option("--start_len", "--start-len", help="Tokens of each prompt.")] = 8,
    output_len: Annotated[int, typer.Option("--output_len", "--output-len", help="New tokens of each.")] = 10,
    vocab_size: Annotated[int, typer.Option(help="Random ids stay below it.")] = 1000,
) -> None:
    """Random requests of the model of token ids, as perf_analyzer reads them with --input-data."""
    _check_shapes(start_len, output_len, vocab_size, requests=requests)
    draw = random.Random(0)
    rows = [
        {
            "input_ids": {"content": [draw.randrange(FIRST_ID, vocab_size) for _ in range(start_len)], "shape": [start_len]},
            "input_lengths": {"content": [start_len], "shape": [1]},
            "request_output_len": {"content": [output_len], "shape": [1]},
        }
        for _ in range(requests)
    ]
    output.write_text(json.dumps({"data": rows}) + "\n")
    typer.echo(output)


def sweep(
    concurrency_range: Annotated[str, typer.Option(help="start:end:step, as perf_analyzer has it.")] = "1:10:2",
    model_name: Annotated[str, typer.Option("--model-name", "-m", help="The model of token ids.")] = "tensorrt_llm",
    batch_size: Annotated[int, typer.Option("--batch_size", "-b", help="Rows of each request.")] = 8,
    start_len: Annotated[int, typer.Option("--start_len", "--start-len", help="Tokens of each prompt.")] = 8,
    output_len: Annotated[int, typer.Option("--output_len", "--output-len", help="New tokens of each.")] = 10,
    seconds: Annotated[float, typer.Option(help="Measured for each concurrency.")] = 5.0,
    vocab_size: Annotated[int, typer.Option(help="Random ids stay below it.")] = 1000,
    url: Url = "localhost:8001",
) -> None:
    """Keep so many requests in flight and count what comes back: a line for each concurrency, as perf_analyzer prints it."""
    from stoker.cli.triton_client import module

    if not 0 < seconds <= 86400:
        raise ConfigError(f"--seconds {seconds} is refused.", cure="Use seconds, above 0 and at most 86400.")
    grpc = module("grpc")
    inputs = _batch(grpc, batch_size, start_len, output_len, vocab_size, 1, 1, 0.0)
    for concurrency in _range(concurrency_range):
        with grpc.InferenceServerClient(url) as client:
            _infer(client, model_name, inputs)
            rate, latency = _load(client, model_name, inputs, concurrency, seconds)
        typer.echo(f"Concurrency: {concurrency}, throughput: {rate * batch_size:.4f} infer/sec, latency {latency * 1e6:.0f} usec")


def _range(text: str) -> range:
    try:
        start, end, step = [int(part) for part in text.split(":")] if text.count(":") == 2 else [int(text), int(text), 1]
        found = range(start, end + 1, step)
    except ValueError:
        found = range(0)
    if not found or found.start < 1 or found[-1] > 4096:
        raise ConfigError(f"--concurrency-range {text!r} is refused.", cure="Write start:end:step, such as 1:10:2, from 1 to 4096.")
    return found


def _load(client: Any, model: str, inputs: list[Any], concurrency: int, seconds: float) -> tuple[float, float]:
    """(requests a second, mean latency in seconds)"""
    latencies: list[float] = []
    errors: list[StokerError] = []
    until = time.perf_counter() + seconds

    def work() -> None:
        try:
            while (started := time.perf_counter()) < until:
                _infer(client, model, inputs)
                latencies.append(time.perf_counter() - started)
        except StokerError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(latencies) / (time.perf_counter() - started), statistics.mean(latencies)
