"""`stoker bench serving`: a server under load, as its clients see it."""

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

from stoker.base.config import check_range
from stoker.base.errors import ConfigError, StokerError
from stoker.cli.bench.report import check_out, origin, percentile, show
from stoker.cli.http import events, get, post
from stoker.cli.progress import Bars
from stoker.cli.scrape import scrape
from stoker.cli.served import served

IDS = range(100, 300)  # ordinary tokens in every vocabulary, the tests' included


@dataclass(slots=True)
class Timed:
    """One request's times, in seconds from its start."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between two pieces of text
    total_s: float = 0.0


def serving(
    engine: Annotated[Path | None, typer.Argument(help="An engine directory, to be served for the measurement.")] = None,
    url: Annotated[str | None, typer.Option(help="A server that runs already, instead.")] = None,
    concurrency: Annotated[list[int], typer.Option(help="Requests in flight. May be repeated.")] = [1, 4, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Requests of each client, one after another.")] = 2,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 64,
    output_len: Annotated[int, typer.Option(help="New tokens of each; none ends earlier.")] = 64,
    options: Annotated[str, typer.Option(help="Further options of `stoker serve ENGINE`.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
) -> None:
    """Latency percentiles and tokens a second of a server, by concurrency.

    Every request streams through /v1/completions with a random prompt of its own. Token counts are checked against the server's.

    Examples:

      stoker bench serving engine --concurrency 1 --concurrency 16 --json serving.json

      stoker bench serving --url http://127.0.0.1:8000 --input-len 512
    """
    if (engine is None) == (url is None):
        raise typer.BadParameter("give an engine, or --url of a running server", param_hint="ENGINE")
    if url is not None and options:
        raise typer.BadParameter("the server of --url runs already", param_hint="--options")
    check_out(json)
    extra = _words(options)
    for name, values in (("concurrency", concurrency), ("rounds", [rounds]), ("input_len", [input_len]), ("output_len", [output_len])):
        for value in values:
            check_range(name, value, 1, 1 << 20)
    with contextlib.ExitStack() as stack:
        where = url if engine is None else stack.enter_context(served(engine, extra))
        assert where is not None
        rows = asyncio.run(_sweep(where, concurrency, rounds, input_len, output_len))
    about = {**origin(engine), "url": url, "rounds": rounds, "input_len": input_len, "output_len": output_len}
    show(f"serving, {input_len} tokens in, {output_len} out", rows, about, json)


def _words(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--options {options!r} is refused: {error}.", cure="Close every quote.") from None


async def _sweep(url: str, levels: list[int], rounds: int, input_len: int, output_len: int) -> list[dict[str, Any]]:
    model = json_format.loads(await get(url, "/v1/models"))["data"][0]["id"]
    body = {"model": model, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    draw = random.Random(0)
    prompts = ({**body, "prompt": draw.choices(IDS, k=input_len)} for _ in itertools.count())
    await post(url, "/v1/completions", next(prompts))  # warm
    rows = []
    with Bars(Console(stderr=True)) as bars:
        for done, level in enumerate(levels):
            bars("serving", done, len(levels))
            rows.append(await _level(url, level, [[next(prompts) for _ in range(rounds)] for _ in range(level)]))
    return rows


async def _level(url: str, level: int, bodies: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """`level` clients at once, each with its requests one after another."""

    async def client(own: list[dict[str, Any]]) -> list[Timed]:
        return [await ask(url, body) for body in own]

    before, started = await scrape(url), time.perf_counter()
    timed = [one for own in await asyncio.gather(*map(client, bodies)) for one in own]
    took, after = time.perf_counter() - started, await scrape(url)
    tokens = sum(body["max_tokens"] for own in bodies for body in own)
    steps = after["num_steps"] - before["num_steps"]
    row: dict[str, Any] = {"clients": level, "tokens/s": tokens / took, "requests/s": len(timed) / took}
    for name, values in (
        ("TTFT", [t.first_s for t in timed]), ("ITL", [gap for t in timed for gap in t.gaps_s]), ("e2e", [t.total_s for t in timed]),
    ):  # fmt: skip
        row |= {f"{name} p{p} ms": percentile(values, p) * 1e3 if values else 0.0 for p in (50, 90, 99)}
    return {**row, "rows a step": (after["row_steps"] - before["row_steps"]) / steps if steps else 0.0}


async def ask(url: str, body: dict[str, Any]) -> Timed:
    """Stream one completion and time it. Raises StokerError when the server counts other tokens than were asked for."""
    timed = Timed()
    usage: dict[str, Any] = {}
    started = last = time.perf_counter()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with aclosing(events(url, "/v1/completions", streamed)) as arriving:
        async for at, data in arriving:
            chunk = json_format.loads(data)
            if "error" in chunk:
                raise StokerError(f"the server ended a stream with {chunk['error'].get('message')!r}")
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["text"]:
                if timed.first_s:
                    timed.gaps_s.append(at - last)
                timed.first_s = timed.first_s or at - started
                last = at
    timed.total_s = last - started
    told = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if told != (asked := (len(body["prompt"]), body["max_tokens"])):
        raise StokerError(f"the server counts {told} prompt and output tokens where {asked} were asked for.")
    return timed
