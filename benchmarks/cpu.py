"""Stoker beside transformers on this CPU, in one run: the same weights in float32, and as the checkpoint stores them (Q4_1), which is what
a build keeps unless it is told otherwise. The figures of the README's table.

PYTHONPATH=src python benchmarks/cpu.py --json benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker import LLM, SamplingParams
from stoker.builder.build import build_cached
from stoker.builder.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.verify import reference_model
from stoker.cli.default_model import default_checkpoint

STREAMS = 16


def prompts(vocab: int, lengths: list[int], seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(100, vocab) for _ in range(length)] for length in lengths]


def timed(work: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the best of `repeats`: the machine is shared, and noise only adds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def one_stream(llm: LLM, model: Any) -> dict[str, float]:
    """Tokens a second of 96 new tokens after a prompt of 16."""
    prompt, count = prompts(49152, [16], 1)[0], 96
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    ids = torch.tensor([prompt])
    kwargs = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    ours = count / timed(lambda: llm.generate(prompt, params))
    theirs = count / timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs))
    return {"stoker": ours, "transformers": theirs, "ratio": ours / theirs, "asked": 1.4}


def sixteen_streams(llm: LLM, model: Any) -> dict[str, Any]:
    """Total tokens a second of 16 prompts of 16 to 256 tokens with 32 new ones each."""
    from transformers import GenerationConfig

    lengths = [16 + 15 * i for i in range(STREAMS)]
    batch, count = prompts(49152, lengths, 2), 32
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    ours = STREAMS * count / timed(lambda: llm.generate(batch, params), 2)
    config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        seconds = timed(lambda: model.generate_batch(inputs=batch, generation_config=config, progress_bar=False), 1)
        theirs: float | None = STREAMS * count / seconds
        note = "generate_batch"
    except Exception as problem:
        padded = torch.tensor([[0] * (max(lengths) - len(p)) + p for p in batch])
        mask = (torch.arange(max(lengths))[None, :] >= torch.tensor([max(lengths) - n for n in lengths])[:, None]).long()
        kwargs = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        theirs = STREAMS * count / timed(lambda: model.generate(padded, attention_mask=mask, **kwargs), 1)
        note = f"padded generate: generate_batch does not run here ({type(problem).__name__})"
    return {"stoker": ours, "transformers": theirs, "ratio": ours / theirs if theirs else None, "asked": 2.0, "against": note}


def shared_prefix(engine: Path) -> dict[str, float]:
    """Mean seconds to the first token of 64 requests that share 400 tokens, with and without reuse."""
    shared = prompts(49152, [400], 3)[0]
    batch = [shared + own for own in prompts(49152, [16] * 64, 4)]
    means = {}
    for reuse in (True, False):
        with LLM(engine, prefix_reuse=reuse, kv_cache_tokens=64 * 600) as llm:
            llm.generate(prompts(49152, [32], 5)[0], SamplingParams(max_tokens=2))
            means[reuse] = asyncio.run(_mean_first(llm, batch))
    return {"reuse_s": means[True], "without_s": means[False], "ratio": means[True] / means[False], "asked": 1 / 3}


async def _mean_first(llm: LLM, batch: list[list[int]]) -> float:
    async def first(prompt: list[int]) -> float:
        started = time.perf_counter()
        async for _ in llm.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True)):
            return time.perf_counter() - started
        raise AssertionError("no token came")

    return statistics.mean(await asyncio.gather(*map(first, batch)))


def command_s(*command: str) -> float:
    return timed(lambda: subprocess.run(command, check=True, capture_output=True), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    args = parser.parse_args()
    checkpoint = default_checkpoint()
    stored = build_cached(checkpoint, BuildConfig(device="cpu"), verify="files").path
    engine = build_cached(checkpoint, BuildConfig(device="cpu", quantization="NO_QUANT"), verify="files").path
    results: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }  # fmt: skip
    results["import_s"] = command_s(sys.executable, "-c", "import stoker") - command_s(sys.executable, "-c", "pass")
    results["help_s"] = command_s(str(Path(sys.executable).with_name("stoker")), "--help")
    print(f"import stoker {results['import_s']:.2f} s, stoker --help {results['help_s']:.2f} s", flush=True)
    model = reference_model(open_checkpoint(checkpoint, "SmolLM2", weights=True), "float32", False).eval()
    for kind, path in {"": engine, "_as_stored": stored}.items():
        with LLM(path, kv_cache_tokens=16 * 1024) as llm, torch.no_grad():
            for name, measure in {"one_stream": one_stream, "sixteen_streams": sixteen_streams}.items():
                results[name + kind] = measure(llm, model)
                print(name + kind, json.dumps(results[name + kind]), flush=True)
    del model
    results["shared_prefix"] = shared_prefix(engine)
    print("shared_prefix", json.dumps(results["shared_prefix"]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
