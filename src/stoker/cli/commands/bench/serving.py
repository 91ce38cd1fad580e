"""`stoker bench serving`: latencies of a server under load, measured by its clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json as json_format
import random
import shlex
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stoker.api.progress import ProgressBars
from stoker.base.config import RuntimeConfig, check_range
from stoker.base.errors import ConfigError, StokerError
from stoker.cli.benchmark.results import check_output_file, percentile, print_results, provenance
from stoker.cli.clients.http import events, get, post
from stoker.cli.clients.metrics import read_metrics
from stoker.cli.engines import MODEL_HELP, prepare_engine
from stoker.cli.options import build_options
from stoker.cli.server_process import running_server
from stoker.deploy.build_settings import BuildSettings

TOKEN_IDS = range(100, 300)  # ordinary tokens in every vocabulary, including those of the tests
MAX_COUNT = 1 << 20
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestTimes:
    """The times of one request, in seconds since it was sent."""

    first_s: float = 0.0  # first text
    gaps_s: list[float] = field(default_factory=list)  # between consecutive texts
    total_s: float = 0.0


@build_options
def serving(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL_HELP} It is served for the measurement.")] = None,
    url: Annotated[str | None, typer.Option(help="Measure this running server instead.")] = None,
    concurrency: Annotated[list[int], typer.Option(help="Number of requests in flight. Repeatable.")] = [1, 4, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Number of consecutive requests of each client.")] = 2,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 64,
    output_len: Annotated[int, typer.Option(help="New tokens of each request; none ends earlier.")] = 64,
    options: Annotated[str, typer.Option(help="Further options of `stoker serve MODEL`.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    *,
    build: BuildSettings,
) -> None:
    """Measure latency percentiles and tokens per second of a server, by concurrency.

    Each request streams through /v1/completions and has its own random prompt. Token counts are checked against the server's.

    Examples:

      stoker bench serving engine --concurrency 1 --concurrency 16

      stoker bench serving engine --options "--kv-cache-fraction 0.5" --json serving.json

      stoker bench serving --url http://127.0.0.1:8000 --input-len 512
    """
    if (model is None) == (url is None):
        raise typer.BadParameter("give a model, or --url of a running server", param_hint="MODEL")
    if url is not None and options:
        raise typer.BadParameter("they have no effect on the running server of --url", param_hint="--options")
    if url is not None and build.chosen():
        raise typer.BadParameter(f"{', '.join(build.chosen())} has no effect on a running server", param_hint="--url")
    check_output_file(json)
    server_options = _split_options(options)
    for name, values in (("concurrency", concurrency), ("rounds", [rounds]), ("input_len", [input_len]), ("output_len", [output_len])):
        for value in values:
            check_range(name, value, 1, MAX_COUNT)
    engine = None if model is None else prepare_engine(model, RuntimeConfig(), build)
    with contextlib.ExitStack() as stack:
        server_url = url if engine is None else stack.enter_context(running_server(engine, server_options))
        assert server_url is not None
        rows = asyncio.run(_measure_levels(server_url, concurrency, rounds, input_len, output_len))
    about = {**provenance(engine), "url": url, "rounds": rounds, "input_len": input_len, "output_len": output_len}
    print_results(f"serving, {input_len} tokens in, {output_len} out", rows, about, json)


def _split_options(options: str) -> list[str]:
    """The options as a list of arguments. Raises ConfigError for an unclosed quote."""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--options {options!r} is refused: {error}.", cure="Close every quote.") from None


async def _measure_levels(url: str, levels: list[int], rounds: int, input_len: int, output_len: int) -> list[dict[str, Any]]:
    """One row of results per concurrency level, after a warm-up request."""
    model = json_format.loads(await get(url, "/v1/models"))["data"][0]["id"]
    body = {"model": model, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    generator = random.Random(0)
    bodies = ({**body, "prompt": generator.choices(TOKEN_IDS, k=input_len)} for _ in itertools.count())
    await post(url, "/v1/completions", next(bodies))
    rows = []
    with ProgressBars(Console(stderr=True)) as bars:
        for done, level in enumerate(levels):
            bars("serving", done, len(levels))
            rows.append(await _measure_level(url, level, [[next(bodies) for _ in range(rounds)] for _ in range(level)]))
    return rows


async def _measure_level(url: str, level: int, bodies: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One row of results for `level` concurrent clients. Client i sends the requests `bodies[i]` one after another."""

    async def send_all(own: list[dict[str, Any]]) -> list[RequestTimes]:
        """Send the requests of one client."""
        return [await time_request(url, body) for body in own]

    before, started = await read_metrics(url), time.perf_counter()
    times = [one for own in await asyncio.gather(*map(send_all, bodies)) for one in own]
    total_s, after = time.perf_counter() - started, await read_metrics(url)
    tokens = sum(body["max_tokens"] for own in bodies for body in own)
    steps = after["num_steps"] - before["num_steps"]
    row: dict[str, Any] = {"clients": level, "tokens/s": tokens / total_s, "requests/s": len(times) / total_s}
    for name, values in (
        ("TTFT", [t.first_s for t in times]), ("ITL", [gap for t in times for gap in t.gaps_s]), ("e2e", [t.total_s for t in times]),
    ):  # fmt: skip
        row |= {f"{name} p{p} ms": percentile(values, p) * 1e3 if values else 0.0 for p in PERCENTILES}
    return {**row, "rows a step": (after["row_steps"] - before["row_steps"]) / steps if steps else 0.0}


async def time_request(url: str, body: dict[str, Any]) -> RequestTimes:
    """Stream one completion and time it. Raises StokerError when the server reports other token counts than `body` requests."""
    times = RequestTimes()
    usage: dict[str, Any] = {}
    started = last = time.perf_counter()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with aclosing(events(url, "/v1/completions", streamed)) as stream:
        async for at, data in stream:
            chunk = json_format.loads(data)
            if "error" in chunk:
                raise StokerError(f"the server ended a stream with {chunk['error'].get('message')!r}")
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["text"]:
                if times.first_s:
                    times.gaps_s.append(at - last)
                times.first_s = times.first_s or at - started
                last = at
    times.total_s = last - started
    reported = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if reported != (requested := (len(body["prompt"]), body["max_tokens"])):
        raise StokerError(f"the server reports {reported} prompt and output tokens for a request of {requested}.")
    return times
