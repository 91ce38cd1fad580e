"""The executor's own Python a step, with a model that costs nothing: plan, inputs, commit, outputs.

PYTHONPATH=src python benchmarks/executor_overhead.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.runtime.bulk import BulkMailbox
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.executor import Executor
from stoker.runtime.measure import random_requests
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.inputs import InputBuilder
from stoker.runtime.worker.model_runner import StepHandle


class StubRunner:
    """Builds the inputs as for a model, and answers token 7."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.inputs = InputBuilder(num_rows, max_blocks, block_size, torch.device("cpu"))

    def prepare(self, request: TokenRequest) -> None: ...
    def add(self, seq: Sequence) -> None: ...
    def remove(self, seq: Sequence) -> None: ...
    def forget_cache(self, blocks: list[int]) -> None: ...

    def launch(self, plan: StepPlan) -> StepHandle:
        packed = self.inputs.pack(plan)
        self.inputs.unpack(packed)
        return StepHandle(packed.sampled, torch.full((len(packed.sampled),), 7, dtype=torch.int32), None, {})


def measure(rows: int, steps: int = 300, input_len: int = 200) -> dict[str, float]:
    limits = Limits(max_batch_size=rows, max_input_len=512, max_output_len=512, max_num_tokens=1 << 16)
    blocks = rows * 16
    info = ExecutorInfo(limits=limits, max_seq_len=1024, vocab_size=1000, device="cpu", kv_cache_tokens=blocks * 64, model="stub")
    scheduler = Scheduler(num_blocks=blocks, tokens_per_block=64, max_batch_size=rows, max_num_tokens=1 << 16, max_seq_len=1024)
    executor = Executor(StubRunner(rows, 16, 64), scheduler, BulkMailbox(info), info, RuntimeConfig(max_queue_size=1 << 16))
    mailbox = executor.mailbox
    assert isinstance(mailbox, BulkMailbox)
    mailbox.submit(random_requests(rows, input_len, steps + 20, 1000))
    for _ in range(10):
        executor.turn(0.0)
        mailbox.take()
    times = []
    for _ in range(steps):
        started = time.thread_time()  # this thread's own time: other processes don't count
        executor.turn(0.0)
        times.append(time.thread_time() - started)
        mailbox.take()
    times.sort()
    return {"rows": rows, "median_ms": statistics.median(times) * 1e3, "p95_ms": times[int(0.95 * steps)] * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(rows) for rows in (1, 16, 64, 256, 1024)]
    for row in results:
        print(f"{row['rows']:5} rows: {row['median_ms']:.3f} ms a step (p95 {row['p95_ms']:.3f})")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
