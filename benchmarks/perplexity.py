"""Compares the CPU time (user and system) of `stoker eval perplexity` with that of transformers on the same windows of a text.

Stoker's time is that of the whole command: start, reading the engine, tokenization, all layers and the scores. That of transformers is the
forward passes in float32 and the cross entropy alone, without its start. Both use one thread and run alternately in processes of their own.

PYTHONPATH=src python benchmarks/perplexity.py --text docs/performance.md --json benchmarks/results/cpu_perplexity.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from isolated_process import IsolatedProcess
from tokenizers import Tokenizer

from stoker.builder.build import build_cached
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.verification.reference_model import load_reference_model
from stoker.cli.benchmark.machine import cpu_flags
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint
from stoker.engine.layerwise import split_windows

TARGET = 0.7
QUANTIZATIONS = ("FP8", "NO_QUANT")


def command(engine: Path, text: Path, window: int) -> tuple[float, float]:
    """CPU seconds of `stoker eval perplexity`, and the perplexity."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = ["eval", "perplexity", str(engine), "--text", str(text), "--window", str(window), "--json"]
    done = subprocess.run([sys.executable, "-m", "stoker", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, json.loads(done.stdout)["perplexity"]


class Reference(NamedTuple):
    model: Any
    windows: list[torch.Tensor]


def reference(checkpoint: Path, windows: list[torch.Tensor]) -> Reference:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    return Reference(load_reference_model(open_checkpoint(checkpoint, "SmolLM2", weights=True), "float32", False), windows)


def forward_passes(reference: Reference) -> tuple[float, float]:
    """CPU seconds of the forward passes of transformers, and the perplexity."""
    model, windows = reference
    started, nll = time.process_time(), 0.0
    for window in windows:
        logits = model(window[None].long(), use_cache=False).logits[0, :-1]
        nll += float(torch.nn.functional.cross_entropy(logits, window[1:].long(), reduction="sum"))
    return time.process_time() - started, math.exp(nll / sum(len(window) - 1 for window in windows))


def summary(runs: list[tuple[float, float]]) -> dict[str, Any]:
    seconds = [run[0] for run in runs]
    return {"cpu_s": statistics.median(seconds), "range_s": [min(seconds), max(seconds)], "perplexity": runs[0][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    checkpoint = default_checkpoint()
    engines = {name: build_cached(checkpoint, BuildConfig(device="cpu", quantization=name), verify="files").path for name in QUANTIZATIONS}
    tokenizer = Tokenizer.from_file(str(engines["FP8"] / "tokenizer.json"))
    windows = split_windows(tokenizer.encode(args.text.read_text(), add_special_tokens=False).ids, args.window)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in (*engines, "transformers")}
    with IsolatedProcess(reference, checkpoint, windows) as model:
        for _ in range(args.repeats):
            runs["transformers"].append(model.measure(forward_passes))
            for name, engine in engines.items():
                runs[name].append(command(engine, args.text, args.window))
    transformers = summary(runs["transformers"])
    found = {name: summary(runs[name]) for name in engines}
    results = {
        **provenance(),
        "avx512_bf16": "avx512_bf16" in cpu_flags(),
        "text_sha256": hashlib.sha256(args.text.read_bytes()).hexdigest(),
        "tokens": sum(len(window) - 1 for window in windows),
        "window": args.window,
        "threads": 1,
        "transformers_float32": transformers,
        **{name: row | {"ratio": row["cpu_s"] / transformers["cpu_s"], "target": TARGET} for name, row in found.items()},
    }
    print(json.dumps(results, indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
