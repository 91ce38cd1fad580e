"""Compares Stoker with transformers on this CPU: the same weights in float32, and as the checkpoint stores them (Q4_1, the default of a
build), each in its own process. The README quotes the results.

PYTHONPATH=src python benchmarks/cpu.py --json benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from isolated_process import IsolatedProcess, copy_engine

from stoker import LLM, SamplingParams
from stoker.builder.build import build_cached
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.verification.reference_model import load_reference_model
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint

STREAMS = 16


def prompts(vocab: int, lengths: list[int], seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(100, vocab) for _ in range(length)] for length in lengths]


def timed(work: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of `repeats` runs. Other work on the machine only makes runs slower."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


ONE, NEW = prompts(49152, [16], 1)[0], 96
LENGTHS = [16 + 15 * i for i in range(STREAMS)]
MANY, NEW_EACH = prompts(49152, LENGTHS, 2), 32


def one_stream(llm: LLM) -> float:
    """Tokens per second of 96 new tokens after a prompt of 16."""
    return NEW / timed(lambda: llm.generate(ONE, SamplingParams(max_tokens=NEW, ignore_eos=True)))


def transformers_one_stream(model: Any) -> float:
    ids = torch.tensor([ONE])
    kwargs = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return NEW / timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs))


def sixteen_streams(llm: LLM) -> float:
    """Total tokens per second of 16 prompts of 16 to 256 tokens with 32 new tokens each."""
    params = SamplingParams(max_tokens=NEW_EACH, ignore_eos=True)
    return STREAMS * NEW_EACH / timed(lambda: llm.generate(MANY, params), 2)


def transformers_sixteen_streams(model: Any) -> tuple[float, str]:
    """The same for transformers, and the method that was used."""
    from transformers import GenerationConfig

    options = {"max_new_tokens": NEW_EACH, "min_new_tokens": NEW_EACH, "do_sample": False, "pad_token_id": 0}
    config = GenerationConfig(**options, eos_token_id=-1)
    try:
        seconds = timed(lambda: model.generate_batch(inputs=MANY, generation_config=config, progress_bar=False), 1)
        return STREAMS * NEW_EACH / seconds, "generate_batch"
    except Exception as problem:
        padded = torch.tensor([[0] * (max(LENGTHS) - len(p)) + p for p in MANY])
        mask = (torch.arange(max(LENGTHS))[None, :] >= torch.tensor([max(LENGTHS) - n for n in LENGTHS])[:, None]).long()
        seconds = timed(lambda: model.generate(padded, attention_mask=mask, **options), 1)
        return STREAMS * NEW_EACH / seconds, f"padded generate: generate_batch does not run here ({type(problem).__name__})"


def shared_prefix(engine: Path) -> dict[str, float]:
    """Mean seconds to the first token of 64 requests that share 400 tokens, with and without reuse."""
    shared = prompts(49152, [400], 3)[0]
    batch = [shared + own for own in prompts(49152, [16] * 64, 4)]
    means = {}
    for reuse in (True, False):
        with LLM(engine, prefix_reuse=reuse, kv_cache_tokens=64 * 600) as llm:
            llm.generate(prompts(49152, [32], 5)[0], SamplingParams(max_tokens=2))
            means[reuse] = asyncio.run(_mean_first(llm, batch))
    return {"reuse_s": means[True], "without_s": means[False], "ratio": means[True] / means[False], "target": 1 / 3}


async def _mean_first(llm: LLM, batch: list[list[int]]) -> float:
    async def first(prompt: list[int]) -> float:
        started = time.perf_counter()
        async for _ in llm.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True)):
            return time.perf_counter() - started
        raise AssertionError("no token was generated")

    return statistics.mean(await asyncio.gather(*map(first, batch)))


def load(engine: Path) -> LLM:
    return LLM(copy_engine(engine), kv_cache_tokens=16 * 1024, prefix_reuse=False)  # the same prompts are timed several times


def reference(checkpoint: Path) -> Any:
    torch.set_grad_enabled(False)
    return load_reference_model(open_checkpoint(checkpoint, "SmolLM2", weights=True), "float32", False).eval()


def compared(stoker: float, transformers: float, target: float) -> dict[str, Any]:
    return {"stoker": stoker, "transformers": transformers, "ratio": stoker / transformers, "target": target}


def command_s(*command: str) -> float:
    return timed(lambda: subprocess.run(command, check=True, capture_output=True), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    args = parser.parse_args()
    checkpoint = default_checkpoint()
    stored = build_cached(checkpoint, BuildConfig(device="cpu"), verify="files").path
    engine = build_cached(checkpoint, BuildConfig(device="cpu", quantization="NO_QUANT"), verify="files").path
    results = provenance()
    results["import_s"] = command_s(sys.executable, "-c", "import stoker") - command_s(sys.executable, "-c", "pass")
    results["help_s"] = command_s(str(Path(sys.executable).with_name("stoker")), "--help")
    print(f"import stoker {results['import_s']:.2f} s, stoker --help {results['help_s']:.2f} s", flush=True)
    with IsolatedProcess(reference, checkpoint) as model:
        for kind, path in {"": engine, "_as_stored": stored}.items():
            with IsolatedProcess(load, path) as llm:
                results["one_stream" + kind] = compared(llm.measure(one_stream), model.measure(transformers_one_stream), 1.4)
                rate, method = model.measure(transformers_sixteen_streams)
                results["sixteen_streams" + kind] = compared(llm.measure(sixteen_streams), rate, 2.0) | {"method": method}
                print(kind, json.dumps(results["one_stream" + kind]), json.dumps(results["sixteen_streams" + kind]), flush=True)
    results["shared_prefix"] = shared_prefix(engine)
    print("shared_prefix", json.dumps(results["shared_prefix"]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
