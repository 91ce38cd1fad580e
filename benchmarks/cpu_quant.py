"""Compares quantized SmolLM2-135M-Instruct with float32 on this CPU: tokens per second, bytes on disk and in memory.

Rounds are interleaved and the best of each engine counts, because other work on the machine only makes runs slower. Each engine has its
own process.

PYTHONPATH=src python benchmarks/cpu_quant.py --json benchmarks/results/cpu_quant.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from isolated_process import IsolatedProcess, copy_engine

from stoker import LLM, SamplingParams
from stoker.base.env import num_threads
from stoker.builder.build import build_cached
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint

# name: (quantization, target of tokens per second ÷ those of float32, target of file bytes ÷ those of float32)
ROWS: dict[str, tuple[str, float | None, float | None]] = {
    "float32": ("NO_QUANT", None, None),
    "int8": ("WEIGHTS_ONLY_INT8", 2.0, 0.30),
    "int4": ("WEIGHTS_ONLY_INT4", 2.5, 0.20),
    "as stored": ("AS_STORED", None, None),
}
NEW, PROMPT, STREAMS = 48, 16, 8

MEMORY = """
import sys
from stoker import LLM, SamplingParams
def fields():
    lines = open("/proc/self/status").read().splitlines()
    return {name: int(line.split()[1]) * 1024 for line in lines for name in ("VmRSS", "RssAnon", "RssFile") if line.startswith(name + ":")}
before = fields()
with LLM(sys.argv[1], kv_cache_tokens=1024) as llm:
    llm.generate(list(range(100, 116)), SamplingParams(max_tokens=8, ignore_eos=True))
    after = fields()
print({name: after[name] - before[name] for name in after})
"""


def load(engine: Path, threads: int | None) -> LLM:
    return LLM(
        copy_engine(engine), kv_cache_tokens=4096, num_threads=threads, prefix_reuse=False
    )  # the same prompts are timed several times


def one_stream(llm: LLM) -> float:
    """Tokens per second of one request, including its prompt."""
    prompt = [random.Random(1).randrange(100, 49000) for _ in range(PROMPT)]
    started = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True))
    return NEW / (time.perf_counter() - started)


def streams(llm: LLM) -> float:
    """Total tokens per second of several requests."""
    draw = random.Random(2)
    prompts = [[draw.randrange(100, 49000) for _ in range(PROMPT)] for _ in range(STREAMS)]
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=NEW // 2, ignore_eos=True))
    return STREAMS * (NEW // 2) / (time.perf_counter() - started)


def prefill(llm: LLM) -> float:
    """Prompt tokens per second of one prompt of 512 tokens."""
    prompt = [random.Random(time.perf_counter_ns()).randrange(100, 49000) for _ in range(512)]
    started = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return 512 / (time.perf_counter() - started)


def resident(engine: Path) -> dict[str, int]:
    """Bytes by which the memory of a new process grows when it loads the engine and runs a request."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(engine)], capture_output=True, text=True, check=True)
    found: dict[str, int] = eval(done.stdout, {"__builtins__": {}})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines = {
        name: build_cached(default_checkpoint(), BuildConfig(device="cpu", quantization=quantization), verify="files").path
        for name, (quantization, _, _) in ROWS.items()
    }
    rows: dict[str, Any] = {
        name: {"bytes": (path / "rank0.safetensors").stat().st_size, "resident": resident(path)} for name, path in engines.items()
    }
    measures = {"one_stream": one_stream, "streams": streams, "prefill": prefill}
    with ExitStack() as stack:
        loaded = {name: stack.enter_context(IsolatedProcess(load, path, args.threads)) for name, path in engines.items()}
        for number in range(args.rounds + 1):
            for name, process in loaded.items():
                for measure, work in measures.items():
                    found = process.measure(work)
                    if number:  # the first round warms up
                        rows[name][measure] = max(rows[name].get(measure, 0.0), found)
    plain = rows["float32"]
    for name, (_, speed_target, size_target) in ROWS.items():
        row = rows[name]
        row |= {f"{measure}_ratio": row[measure] / plain[measure] for measure in measures} | {"bytes_ratio": row["bytes"] / plain["bytes"]}
        row["resident_ratio"] = row["resident"]["VmRSS"] / plain["resident"]["VmRSS"]
        row |= {"target_one_stream_ratio": speed_target, "target_bytes_ratio": size_target}
        print(f"{name:10}", json.dumps(row), flush=True)
    results = {
        **provenance(),
        "threads": args.threads or num_threads(),
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
