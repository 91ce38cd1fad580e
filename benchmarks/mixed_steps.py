"""Measures steps that compute prompts beside decodes, by the number of prompt tokens, and their kernels.

    stoker build CHECKPOINT -o engine --dummy-weights --quantize FP8_KV
    PYTHONPATH=src python benchmarks/mixed_steps.py --engine engine --rows 128 --json mixed_steps.json

`rows` sequences with contexts of 1,000 tokens decode in each step. In `apart`, a prompt is submitted after some steps without prompts; in
`series`, each step computes one. `launch_ms` is the time in which the host launches such a step; with overlap, the device computes the step
before in this time. `before_ms` is the time of that step, which ends for the host after the launch. With `--vary`, consecutive prompts
differ by one token, as the steps of a server do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.cli.benchmark.breakdown import print_breakdown
from stoker.cli.benchmark.results import provenance
from stoker.profiling.batch_run import random_requests
from stoker.profiling.breakdown import break_down
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.schedule.plan import StepPlan

CONTEXT, PAUSE = 1000, 4


class Driver:
    """Runs the step loop of an executor, and submits prompts of one size."""

    def __init__(self, engine: Path) -> None:
        self.executor: Executor = load_executor(engine, RuntimeConfig(prefix_reuse=False), SynchronousMailbox)
        self.executor.capture_all()
        assert isinstance(self.executor.mailbox, SynchronousMailbox)
        self.mailbox, self.seed = self.executor.mailbox, 0
        self.launches: dict[int, float] = {}  # prompt tokens of the newest launches: seconds
        launch = self.executor.runner.launch

        def timed(plan: StepPlan) -> Any:
            started = time.perf_counter()
            handle = launch(plan)
            self.launches[plan.num_prefill_tokens] = time.perf_counter() - started
            return handle

        self.executor.runner.launch = timed  # type: ignore[method-assign]

    def submit(self, count: int, prompt: int, generated: int) -> None:
        self.seed += 1
        self.mailbox.submit(random_requests(count, prompt, generated, self.executor.info.vocab_size, self.seed))

    def turn(self) -> None:
        self.executor.turn(0.0)
        self.mailbox.pop_outputs()

    def steps(self, prompt: int, pause: int, num_prompts: int, vary: bool = False) -> dict[str, Any]:
        """The median times of steps with one prompt and of those without, when a prompt follows each `pause` steps."""
        first, launches = self.executor.step_history.num_steps, []
        sizes = [prompt + i if vary else prompt for i in range(num_prompts)]
        for size in sizes:
            self.submit(1, size, 1)
            for _ in range(1 + pause):
                self.launches.clear()
                self.turn()
                launches += [seconds for tokens, seconds in self.launches.items() if tokens in sizes]
        for _ in range(4):
            self.turn()
        found = list(self.executor.step_history.steps(first))
        has_prompt = [step.tokens - step.num_decodes in sizes for step in found]
        mixed = [step.duration_s for step, chosen in zip(found, has_prompt, strict=True) if chosen]
        before = [step.duration_s for step, chosen in zip(found, has_prompt[1:], strict=False) if chosen]
        decodes = [step.duration_s for step in found if step.is_decode]
        return {
            "mixed_ms": round(1e3 * statistics.median(mixed), 3), "max_ms": round(1e3 * max(mixed), 3), "steps": len(mixed),
            "before_ms": round(1e3 * statistics.median(before), 3), "decode_ms": round(1e3 * statistics.median(decodes), 3),
            "launch_ms": round(1e3 * statistics.median(launches), 3),
        }  # fmt: skip


def settle(driver: Driver, rows: int) -> None:
    """Start the sequences that decode, and wait until all do."""
    driver.submit(rows, CONTEXT, 3000)
    stats = driver.executor.stats
    driver.turn()
    while stats.last_step_rows < rows or stats.last_step_prefill_tokens:
        driver.turn()
    for _ in range(20):
        driver.turn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompts", default="16,128,256,512,768,1024,1536,2048,3072,4096")
    parser.add_argument("--count", type=int, default=16, help="prompts of each size")
    parser.add_argument("--vary", action="store_true", help="each prompt has one token more than the one before")
    parser.add_argument("--breakdown", type=int, default=0, help="prompt tokens of steps whose kernels are listed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    driver = Driver(args.engine)
    settle(driver, args.rows)
    rows = []
    for prompt in map(int, args.prompts.split(",")):
        driver.steps(prompt, 1, 3)  # kernels of this size run for the first time
        kinds = {"apart": PAUSE, "series": 0}
        row = {"prompt": prompt} | {name: driver.steps(prompt, pause, args.count, args.vary) for name, pause in kinds.items()}
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {**provenance(args.engine, args.device), "rows": args.rows, "context": CONTEXT, "steps": rows}
    if args.breakdown:
        turn = driver.executor.turn

        def submit_and_turn(timeout_s: float) -> None:
            driver.submit(1, args.breakdown, 1)
            turn(timeout_s)

        driver.executor.turn = submit_and_turn  # type: ignore[method-assign]
        for _ in range(8):
            driver.executor.turn(0.0)
        found = break_down(driver.executor, 12)
        print_breakdown(found)
        result["breakdown"] = msgspec.to_builtins(found)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
