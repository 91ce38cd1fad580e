"""Measures the goodput of a server over HTTP: requests per second that meet latency targets, with Poisson arrivals.

    PYTHONPATH=src python benchmarks/goodput.py --checkpoint checkpoint --config benchmarks/models/llama-3.1-8b    # random weights
    stoker build checkpoint -o engine --dummy-weights --quantize FP8_KV && stoker serve engine --port 9000
    PYTHONPATH=src python benchmarks/goodput.py --url http://127.0.0.1:9000 --trace fixed --first-rate 24 --json goodput.jsonl

Any server with /v1/completions can be measured, vLLM's too. `fixed` has prompts of 1,000 tokens and 256 generated ones; `mixed` has prompts
of 1,000 and answers of 256 tokens × log-normal numbers (sigma 0.8, at most 4,000 and 1,000 tokens). A request is in time if its first token
arrives within 500 ms and the mean time between its texts is at most 30 ms (as `--goodput ttft:500 tpot:30` of `vllm bench serve`); `strict`
counts those of which also 99 % of these times are at most 30 ms. The rate grows by a fifth until less than 90 % are in time, or shrinks
by as much until 90 % are, if the first one is too high.

    PYTHONPATH=src python benchmarks/goodput.py --url http://127.0.0.1:9000 --rates 36 43 36 43 --seconds 14 --record runs.json --steps

`--rates` measures these rates in turn; a rate has the same arrivals each time. `--record` writes each request: when its client planned to
send it, when it did, and when each text arrived. With `--steps`, also the steps of a Stoker server, which are read four times per second.
The server and the clients share a clock if they run on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from first_token import save_tokenizer

from stoker.base.errors import StokerError
from stoker.cli.benchmark.results import percentile, provenance
from stoker.cli.clients.http import get
from stoker.cli.commands.bench.serving import RequestTimes, time_request

FIRST_S, BETWEEN_S, ENOUGH = 0.5, 0.03, 0.9
PROMPT, GENERATED, SIGMA = 1000, 256, 0.8
MAX_PROMPT, MAX_GENERATED = 4000, 1000
GROWTH, MAX_LEVELS = 1.2, 5
STEPS_INTERVAL_S = 0.25


class Sent(NamedTuple):
    """A request, with monotonic times in seconds."""

    planned_s: float
    sent_s: float
    times: RequestTimes | None  # None if it failed


def arrivals(trace: str, rate: float, seconds: float, seed: int) -> Iterator[tuple[float, int, int]]:
    """(second, prompt tokens, generated tokens) of each request."""
    dice, now = random.Random(seed), 0.0
    while (now := now + dice.expovariate(rate)) < seconds:
        if trace == "fixed":
            yield now, PROMPT, GENERATED
        else:
            prompt, generated = (size * dice.lognormvariate(-(SIGMA**2) / 2, SIGMA) for size in (PROMPT, GENERATED))
            yield now, max(1, min(int(prompt), MAX_PROMPT)), max(2, min(int(generated), MAX_GENERATED))


async def send(url: str, model: str, trace: str, rate: float, seconds: float, seed: int) -> list[Sent]:
    """Send one process' part of the requests."""
    draw, bodies = random.Random(seed), []
    for at, prompt, generated in arrivals(trace, rate, seconds, seed):
        ids = draw.choices(range(300, 30_000), k=prompt)
        bodies.append((at, {"model": model, "prompt": ids, "max_tokens": generated, "temperature": 0, "ignore_eos": True}))
    began = time.perf_counter()

    async def one(at: float, body: dict[str, Any]) -> Sent:
        await asyncio.sleep(began + at - time.perf_counter())
        sent_s, times = time.perf_counter(), None
        try:
            times = await time_request(url, body)
        except StokerError as error:
            print(error, flush=True)
        return Sent(began + at, sent_s, times)

    return await asyncio.gather(*(one(*each) for each in bodies))


def run_process(arguments: tuple[Any, ...]) -> list[Sent]:
    """A process: `send` with these arguments."""
    return asyncio.run(send(*arguments))


def is_in_time(times: RequestTimes | None, strict: bool = False) -> bool:
    """Whether a request had its first text in FIRST_S and a mean time between texts of at most BETWEEN_S; False for one that failed.

    With `strict`, also 99 % of the times between its texts are at most BETWEEN_S.
    """
    if times is None or times.first_s > FIRST_S:
        return False
    gaps = times.gaps_s
    return not gaps or (sum(gaps) / len(gaps) <= BETWEEN_S and (not strict or percentile(gaps, 99) <= BETWEEN_S))


def measure(
    url: str, model: str, trace: str, rate: float, seconds: float, processes: int, seed: int, with_steps: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of one rate of arrivals, and their record."""
    parts = [(url, model, trace, rate / processes, seconds, seed * processes + i) for i in range(processes)]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        result = pool.map_async(run_process, parts, chunksize=1)
        steps = read_steps(url, result) if with_steps else []
        sent = sorted((one for each in result.get() for one in each), key=lambda one: one.sent_s)
    row = {"trace": trace, **summarize([one.times for one in sent], seconds), "seconds": round(time.perf_counter() - began, 1)}
    return row, record(rate, sent, steps)


def summarize(found: list[RequestTimes | None], seconds: float) -> dict[str, Any]:
    """The results of requests that arrived within `seconds`."""
    done = [times for times in found if times is not None]
    gaps = [gap for times in done for gap in times.gaps_s]
    in_time, strict = sum(map(is_in_time, found)), sum(is_in_time(times, strict=True) for times in found)
    return {
        "requests_per_s": round(len(found) / seconds, 2), "requests": len(found), "failed": len(found) - len(done),
        "in_time": round(in_time / len(found), 4), "goodput": round(in_time / seconds, 2), "goodput_strict": round(strict / seconds, 2),
        "first_token_ms": {f"p{p}": round(1e3 * percentile([times.first_s for times in done], p), 1) for p in (50, 90, 99)},
        "inter_token_ms": {f"p{p}": round(1e3 * percentile(gaps, p), 2) for p in (50, 90, 99)},
    }  # fmt: skip


def read_steps(url: str, result: Any) -> list[list[Any]]:
    """The steps of a Stoker server until `result` is ready: [end, duration, decodes, tokens of each further row]. Times in seconds."""
    found: list[list[Any]] = []
    state = json.loads(asyncio.run(get(url, "/console/api/live?first_step=0")))["state"]
    while state is not None and not result.ready():
        result.wait(STEPS_INTERVAL_S)
        answer = json.loads(asyncio.run(get(url, f"/console/api/live?first_step={state['next_step']}")))
        found += [
            [round(end_s, 5), round(duration_s, 5), num_decodes, num_new]
            for _, end_s, duration_s, _, num_decodes, _, num_new in answer["steps"]
        ]
        state = answer["state"]
    return found


def record(rate: float, sent: list[Sent], steps: list[list[Any]]) -> dict[str, Any]:
    """The requests and steps of one rate: [planned, sent, [units of 10 µs from there to the arrival of each text]]. Times in seconds."""
    requests = []
    for planned_s, sent_s, times in sent:
        texts = [] if times is None else itertools.accumulate([times.first_s, *times.gaps_s])
        requests.append([round(planned_s, 5), round(sent_s, 5), [round(1e5 * at_s) for at_s in texts]])
    return {"rate": rate, "requests": requests, "steps": steps}


def save_checkpoint(config: Path, folder: Path) -> None:
    """A config.json and a tokenizer in which every token has text, which any server can load with random weights."""
    save_tokenizer(folder, json.loads((config / "config.json").read_text())["vocab_size"])
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for path in config.glob("*.json"):
        shutil.copy(path, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="write a checkpoint without weights here, and end")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--name", default="stoker", help="the name of the server in the results")
    parser.add_argument("--trace", choices=("fixed", "mixed"), default="fixed")
    parser.add_argument("--first-rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--rates", type=float, nargs="+", help="measure these rates instead")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, for each rate")
    parser.add_argument("--max-levels", type=int, default=MAX_LEVELS)
    parser.add_argument("--device", default="cuda", help="cuda or cpu, for the description of the machine")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--json", type=Path, help="append a line per rate to this file")
    parser.add_argument("--record", type=Path, help="write each request, and with --steps each step, to this file")
    parser.add_argument("--steps", action="store_true", help="also read the steps of the server")
    args = parser.parse_args()
    if args.checkpoint is not None:
        save_checkpoint(args.config, args.checkpoint)
        return
    model = json.loads(asyncio.run(get(args.url, "/v1/models")))["data"][0]["id"]
    measure(args.url, model, args.trace, 8.0, 2.0, args.processes, 0)  # all shapes run once
    records = []

    def run(rate: float, seed: int, with_steps: bool = False) -> float:
        """Measure a rate. Returns the share of requests that are in time."""
        row, recorded = measure(args.url, model, args.trace, rate, args.seconds, args.processes, seed, with_steps)
        print(args.name, json.dumps(row), flush=True)
        about = {"server": args.name, **provenance(device=args.device)}
        records.append({**recorded, "row": row})
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps({**about, **row}) + "\n")
        if args.record is not None:
            args.record.write_text(json.dumps({**about, "runs": records}) + "\n")
        return row["in_time"]

    if args.rates is not None:
        seeds = {rate: seed for seed, rate in enumerate(sorted(set(args.rates)), 1)}
        for rate in args.rates:
            run(rate, seeds[rate], args.steps)
        return
    rate, growth = args.first_rate, None
    for level in range(1, args.max_levels + 1):
        needed = GROWTH if run(rate, level, args.steps) >= ENOUGH else 1 / GROWTH
        if growth not in (None, needed):
            break
        growth = needed
        rate *= growth


if __name__ == "__main__":
    main()
