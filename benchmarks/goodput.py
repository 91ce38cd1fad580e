"""Measures the goodput of a server over HTTP: requests per second that meet latency targets, with Poisson arrivals.

    PYTHONPATH=src python benchmarks/goodput.py --checkpoint checkpoint --config benchmarks/models/llama-3.1-8b    # random weights
    stoker build checkpoint -o engine --dummy-weights --quantize FP8_KV && stoker serve engine --port 9000
    PYTHONPATH=src python benchmarks/goodput.py --url http://127.0.0.1:9000 --trace fixed --first-rate 24 --json goodput.jsonl

Any server with /v1/completions can be measured, vLLM's too. `fixed` has prompts of 1,000 tokens and 256 generated ones; `mixed` has prompts
of 1,000 and answers of 256 tokens × log-normal numbers (sigma 0.8, at most 4,000 and 1,000 tokens). A request is in time if its first token
arrives within 500 ms and the mean time between its texts is at most 30 ms (as `--goodput ttft:500 tpot:30` of `vllm bench serve`); `strict`
counts those of which also 99 % of these times are at most 30 ms. The rate grows by a fifth until less than 90 % are in time, or shrinks
by as much until 90 % are, if the first one is too high.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from first_token import save_tokenizer

from stoker.base.errors import StokerError
from stoker.cli.benchmark.results import percentile, provenance
from stoker.cli.clients.http import get
from stoker.cli.commands.bench.serving import RequestTimes, time_request

FIRST_S, BETWEEN_S, ENOUGH = 0.5, 0.03, 0.9
PROMPT, GENERATED, SIGMA = 1000, 256, 0.8
MAX_PROMPT, MAX_GENERATED = 4000, 1000
GROWTH, MAX_LEVELS = 1.2, 5


def arrivals(trace: str, rate: float, seconds: float, seed: int) -> Iterator[tuple[float, int, int]]:
    """(second, prompt tokens, generated tokens) of each request."""
    dice, now = random.Random(seed), 0.0
    while (now := now + dice.expovariate(rate)) < seconds:
        if trace == "fixed":
            yield now, PROMPT, GENERATED
        else:
            prompt, generated = (size * dice.lognormvariate(-(SIGMA**2) / 2, SIGMA) for size in (PROMPT, GENERATED))
            yield now, max(1, min(int(prompt), MAX_PROMPT)), max(2, min(int(generated), MAX_GENERATED))


async def send(url: str, model: str, trace: str, rate: float, seconds: float, seed: int) -> list[RequestTimes | None]:
    """Send one process' part of the requests. None for each request that failed."""
    draw, bodies = random.Random(seed), []
    for at, prompt, generated in arrivals(trace, rate, seconds, seed):
        ids = draw.choices(range(300, 30_000), k=prompt)
        bodies.append((at, {"model": model, "prompt": ids, "max_tokens": generated, "temperature": 0, "ignore_eos": True}))
    began = time.perf_counter()

    async def one(at: float, body: dict[str, Any]) -> RequestTimes | None:
        await asyncio.sleep(began + at - time.perf_counter())
        try:
            return await time_request(url, body)
        except StokerError as error:
            print(error, flush=True)
            return None

    return await asyncio.gather(*(one(*each) for each in bodies))


def run_process(arguments: tuple[Any, ...]) -> list[RequestTimes | None]:
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


def measure(url: str, model: str, trace: str, rate: float, seconds: float, processes: int, seed: int) -> dict[str, Any]:
    """The results of one rate of arrivals."""
    parts = [(url, model, trace, rate / processes, seconds, seed * processes + i) for i in range(processes)]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        found = [times for each in pool.map(run_process, parts, chunksize=1) for times in each]
    done = [times for times in found if times is not None]
    gaps = [gap for times in done for gap in times.gaps_s]
    in_time, strict = sum(map(is_in_time, found)), sum(is_in_time(times, strict=True) for times in found)
    return {
        "trace": trace, "requests_per_s": round(len(found) / seconds, 2), "requests": len(found), "failed": len(found) - len(done),
        "in_time": round(in_time / len(found), 4), "goodput": round(in_time / seconds, 2), "goodput_strict": round(strict / seconds, 2),
        "first_token_ms": {f"p{p}": round(1e3 * percentile([times.first_s for times in done], p), 1) for p in (50, 90, 99)},
        "inter_token_ms": {f"p{p}": round(1e3 * percentile(gaps, p), 2) for p in (50, 90, 99)},
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


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
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, for each rate")
    parser.add_argument("--max-levels", type=int, default=MAX_LEVELS)
    parser.add_argument("--device", default="cuda", help="cuda or cpu, for the description of the machine")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--json", type=Path, help="append a line per rate to this file")
    args = parser.parse_args()
    if args.checkpoint is not None:
        save_checkpoint(args.config, args.checkpoint)
        return
    model = json.loads(asyncio.run(get(args.url, "/v1/models")))["data"][0]["id"]
    measure(args.url, model, args.trace, 8.0, 2.0, args.processes, 0)  # all shapes run once
    rate, growth = args.first_rate, None
    for level in range(1, args.max_levels + 1):
        row = measure(args.url, model, args.trace, rate, args.seconds, args.processes, level)
        print(args.name, json.dumps(row), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps({"server": args.name, **provenance(device=args.device), **row}) + "\n")
        needed = GROWTH if row["in_time"] >= ENOUGH else 1 / GROWTH
        if growth not in (None, needed):
            break
        growth = needed
        rate *= growth


if __name__ == "__main__":
    main()
