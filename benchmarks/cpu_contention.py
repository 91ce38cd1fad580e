"""Measures decoding next to busy processes: CPU time and speed of SmolLM2-135M-Instruct as stored (Q4_1), compared with a quiet machine.

The fair share of the speed is that of a process whose threads get as much of the cores as each busy process:
speed on the quiet machine × cores ÷ (busy processes + threads). A team that becomes one thread gets cores ÷ (busy processes + 1) of
the speed of one thread at most, which is `limit_of_one_thread` in the same unit.

PYTHONPATH=src python benchmarks/cpu_contention.py --json benchmarks/results/cpu_contention.json
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

from stoker import LLM, SamplingParams
from stoker.base.env import num_threads
from stoker.builder.build import build_cached
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint

PROMPT, NEW = 16, 48
LONGEST_S = 120  # after which busy processes end by themselves
BUSY = f"import time; end = time.time() + {LONGEST_S}\nwhile time.time() < end: pass"
TARGETS = {"cpu_ratio": 2.0, "share_of_fair_speed": 0.6}


def timed(llm: LLM) -> list[float]:
    """Wall seconds and CPU seconds of NEW tokens."""
    prompt = [random.Random(1).randrange(100, 49000) for _ in range(PROMPT)]
    wall, cpu = time.perf_counter(), time.process_time()
    llm.generate(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True))
    return [time.perf_counter() - wall, time.process_time() - cpu]


def quiet_runs(llm: LLM) -> list[list[float]]:
    return [timed(llm) for _ in range(16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = build_cached(default_checkpoint(), BuildConfig(device="cpu", quantization="AS_STORED"), verify="files").path
    settings: dict[str, Any] = {"kv_cache_tokens": 4096, "prefix_reuse": False}
    with LLM(engine, num_threads=1, **settings) as llm:
        one_thread_wall = min(wall for wall, _ in quiet_runs(llm))
    with LLM(engine, num_threads=args.threads, **settings) as llm, ExitStack() as stack:
        quiet = quiet_runs(llm)
        for _ in range(args.busy):
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY])).kill)
        time.sleep(1)  # until all are busy
        busy = [timed(llm) for _ in range(args.rounds)]
    cores = len(os.sched_getaffinity(0))
    best_wall, best_cpu = (min(column) for column in zip(*quiet, strict=True))
    fair = cores / (args.busy + args.threads)
    results: dict[str, Any] = {
        **provenance(),
        "cores": cores,
        "threads": args.threads,
        "busy_processes": args.busy,
        "quiet_s": {"wall": best_wall, "cpu": best_cpu, "wall_with_one_thread": one_thread_wall},
        "busy_s": [{"wall": wall, "cpu": cpu} for wall, cpu in busy],
        "cpu_ratio": [cpu / best_cpu for _, cpu in busy],
        "share_of_fair_speed": [best_wall / wall / fair for wall, _ in busy],
        "limit_of_one_thread": best_wall / one_thread_wall * (args.busy + args.threads) / (args.busy + 1),
        "targets": TARGETS,
    }
    print(json.dumps(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
