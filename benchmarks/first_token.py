"""Measures the time to the first token over HTTP for single requests, with random weights and an artificial tokenizer of the model's size.

PYTHONPATH=src python benchmarks/first_token.py --config benchmarks/models/llama-3.1-8b --json first_token.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import percentile, provenance
from stoker.cli.clients.http import get
from stoker.cli.commands.bench.serving import time_request
from stoker.cli.server_process import running_server
from stoker.runtime.aot import compile_kernels


def save_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `size` tokens that all have text, so that every id of a random model adds text to the response."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{i}" for i in range(size - len(letters)))]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    folder.mkdir(parents=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


async def measure(url: str, count: int, input_len: int, output_len: int) -> list[float]:
    """Milliseconds from a request to its first text, for one request after another."""
    model = json.loads(await get(url, "/v1/models"))["data"][0]["id"]
    draw, found = random.Random(0), []
    for _ in range(count):
        prompt = draw.choices(range(300, 30_000), k=input_len)
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        found.append((await time_request(url, body)).first_s * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--options", default="", help="further options of stoker serve")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine, size = Path(folder) / "engine", json.loads((Path(args.config) / "config.json").read_text())["vocab_size"]
        save_tokenizer(Path(folder) / "tokenizer", size)
        limits = Limits(max_batch_size=16, max_input_len=512, max_output_len=128, max_num_tokens=2048)
        config = BuildConfig(dtype=args.dtype, dummy_weights=True, limits=limits, device=args.device, tokenizer=folder + "/tokenizer")
        build(args.config, engine, config, verify="none", kernels=compile_kernels)
        started = time.time()
        with running_server(engine, args.options.split()) as url:
            ready_s = time.time() - started
            asyncio.run(measure(url, 5, args.input_len, args.output_len))  # warm up all shapes
            times = asyncio.run(measure(url, args.requests, args.input_len, args.output_len))
        about = provenance(engine, args.device)
    row = {
        "input_len": args.input_len,
        "first_token_ms": {"median": statistics.median(times), "p90": percentile(times, 90), "max": max(times)},
        "server_ready_s": ready_s,
    }
    print(row, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({**about, "results": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
