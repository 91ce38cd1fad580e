"""What several GPUs of one host give, within a bounded time: the all-reduce's sweep, then engines by tensor-parallel width.

    PYTHONPATH=src python benchmarks/parallel.py --out results --seconds 150

Steps that fit side by side run at once, on GPUs of their own. Each result is a line of results/parallel.jsonl as soon as it is there, so
what a cut leaves is whole; each step's output is in a log of its own. A step that would not end in time is not begun, or is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 128  # decode steps whose median counts


@dataclass
class Step:
    """One process: an engine measured on `gpus` neighbouring GPUs, or the sweep."""

    name: str
    gpus: int
    seconds: float  # at most
    needs: float  # seconds without which it is not begun
    command: list[str] = field(default_factory=list)


def engine(name: str, gpus: int, seconds: float, needs: float, model: str, *more: str) -> Step:
    command = [str(Path(__file__)), "--engine", f"{HERE}/models/{model}", "--tensor-parallel", str(gpus), "--name", name, *more]
    return Step(name, gpus, seconds, needs, command)


def plan(gpus: int) -> list[list[Step]]:
    """Rounds of steps that run side by side. A machine with fewer GPUs leaves out what does not fit."""
    widths = ",".join(str(n) for n in (8, 4, 2) if n <= gpus)
    fp8 = ("--quantize", "FP8_KV")
    rounds = [
        [Step("all-reduce", gpus, 50, 15, [str(HERE / "allreduce.py"), "--ranks", widths])],
        [
            engine("70b fp8 tp2", 2, 60, 30, "llama-3.1-70b", *fp8, "--latency", "1x1000", "--max-batch", "8"),
            engine("70b fp8 tp1", 1, 60, 30, "llama-3.1-70b", *fp8, "--latency", "1x1000", "--max-batch", "8"),
            engine("8b bf16 tp1", 1, 60, 30, "llama-3.1-8b", "--latency", "1x1000,64x1000", "--max-batch", "64"),
        ],
        [
            engine("70b fp8 tp4", 4, 60, 25, "llama-3.1-70b", *fp8, "--latency", "1x1000,64x1000", "--max-batch", "64"),
        ],
        [engine("8b bf16 tp4", 4, 40, 15, "llama-3.1-8b", "--latency", "1x1000,64x1000", "--max-batch", "64")],
        [engine("70b fp8 tp8", 8, 60, 25, "llama-3.1-70b", *fp8, "--latency", "1x1000,64x1000", "--max-batch", "64")],
        [engine("70b fp8 load", gpus, 300, 70, "llama-3.1-70b", *fp8, "--throughput", "1000/1000:768", "--max-batch", "768")],
        [
            engine("8b bf16 tp2", 2, 45, 20, "llama-3.1-8b", "--latency", "1x1000,64x1000", "--max-batch", "64"),
            engine("8b bf16 tp2, nccl alone", 2, 45, 20, "llama-3.1-8b", "--latency", "1x1000,64x1000", "--max-batch", "64", "--nccl"),
        ],
    ]
    return [[step for step in steps if step.gpus <= gpus] for steps in rounds]


def run_rounds(rounds: list[list[Step]], gpus: int, out: Path, ends: float) -> None:
    for steps in rounds:
        running, first = [], 0
        for step in steps:
            left = ends - time.monotonic()
            if left < step.needs or first + step.gpus > gpus:
                print(f"{step.name}: left out, {left:.0f} s are left", flush=True)
                continue
            devices = ",".join(str(first + i) for i in range(step.gpus))
            first += step.gpus
            running.append((step, devices, begin(step, devices, out), time.monotonic() + min(step.seconds, left)))
        for step, devices, process, deadline in running:
            try:
                code = process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                code = -1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            print(f"{step.name} on {devices}: {'ended' if code == 0 else f'cut or failed ({code}); see its log'}", flush=True)


def begin(step: Step, devices: str, out: Path) -> subprocess.Popen[bytes]:
    log = (out / f"{step.name.replace(' ', '_').replace(',', '')}.log").open("wb")
    command = [sys.executable, *step.command, "--json", str(out / "parallel.jsonl")]
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": devices}, start_new_session=True)


class Watched:
    """How busy each visible GPU was while the block ran: the share of time in which a kernel ran, by the driver's count."""

    def __enter__(self) -> Watched:
        self.seen: dict[str, list[int]] = defaultdict(list)
        ids = os.environ.get("CUDA_VISIBLE_DEVICES")
        command = [
            "nvidia-smi",
            "--query-gpu=index,utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
            *(["-i", ids] if ids else []),
        ]
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        except OSError:
            self.process = None
        return self

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            index, _, share = line.partition(",")
            if share.strip().isdigit():
                self.seen[index.strip()].append(int(share))

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def shares(self) -> dict[str, float]:
        """The mean by GPU, without the ends."""
        return {index: round(statistics.mean(seen[2:-1]) / 100, 3) for index, seen in self.seen.items() if len(seen) > 4}


def measure(args: argparse.Namespace) -> None:
    """Build the engine without weights, load it, and add lines to the results file."""
    started = time.monotonic()
    from stoker.base import logging
    from stoker.base.config import Limits, Mapping, RuntimeConfig
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig
    from stoker.cli.bench.report import origin
    from stoker.runtime.bulk import BulkMailbox
    from stoker.runtime.load import load_executor
    from stoker.runtime.measure import random_requests, run

    logging.configure("INFO")
    about = {"what": args.name, **origin(device="cuda"), "tensor_parallel": args.tensor_parallel}

    def tell(row: dict[str, Any]) -> None:
        line = json.dumps(about | row | {"after_s": round(time.monotonic() - started, 1)}, ensure_ascii=False)
        print(line, flush=True)
        with Path(args.json).open("a") as file:
            file.write(line + "\n")

    limits = Limits(max_batch_size=args.max_batch, max_input_len=2048, max_output_len=2048, max_num_tokens=8192)
    config = BuildConfig(dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=args.quantize,
                         mapping=Mapping(tensor_parallel=args.tensor_parallel))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        build(args.engine, folder + "/engine", config, verify="none")
        settings = RuntimeConfig(prefix_reuse=False, max_queue_size=1 << 20, custom_all_reduce=not args.nccl)
        executor = load_executor(folder + "/engine", settings, BulkMailbox)
        tell({"ready_s": round(time.monotonic() - started, 1)})
        vocab = executor.info.vocab_size
        for batch, context in pairs(args.latency, "x"):
            run(executor, random_requests(batch, context, 4, vocab, seed=1), 4)  # shapes seen once: nothing is compiled below
            with Watched() as watched:
                turns = run(executor, random_requests(batch, context, STEPS + 16, vocab, seed=2), STEPS + 16).turns_s[-STEPS:-2]
            tell({"batch": batch, "context": context, "step_ms": statistics.median(turns) * 1e3, "max_step_ms": max(turns) * 1e3,
                  "busy": watched.shares})  # fmt: skip
            tell({"batch": batch, "context": context, "leader": shares(executor, batch, context)})
        for lengths in filter(None, args.throughput.split(",")):
            shape, _, count = lengths.partition(":")
            isl, osl = map(int, shape.split("/"))
            stop = threading.Event()
            threading.Thread(target=progress, args=(executor, tell, stop), daemon=True).start()
            with Watched() as watched:
                result = run(executor, random_requests(int(count), isl, osl, vocab, seed=40), osl)
            stop.set()
            tell({"isl": isl, "osl": osl, "requests": int(count), "output_tokens_per_s": result.output_tokens_per_s,
                  "total_s": result.total_s, "busy": watched.shares})  # fmt: skip
        executor.close()


def shares(executor: Any, batch: int, context: int) -> dict[str, Any]:
    """Where the leader's device spends its decode steps; a row a kernel, the longest first."""
    import msgspec

    from stoker.base.errors import StokerError
    from stoker.runtime.breakdown import break_down
    from stoker.runtime.measure import random_requests

    executor.mailbox.submit(random_requests(batch, context, 96, executor.info.vocab_size, seed=3))
    try:
        executor.turn(0.0)
        while executor.stats.last_step_tokens != batch:
            executor.turn(0.0)
        for _ in range(6):
            executor.turn(0.0)
        found = msgspec.to_builtins(break_down(executor, 16))
        found["kernels"] = found["kernels"][:12]
    except (StokerError, RuntimeError, AttributeError) as error:  # a profiler that does not work here is no reason to end
        found = {"error": str(error)}
    while executor.is_busy:
        executor.turn(0.0)
    executor.mailbox.take()
    return found


def progress(executor: Any, tell: Any, stop: threading.Event) -> None:
    """Tokens so far, every five seconds: what a cut leaves."""
    started, before = time.monotonic(), executor.stats.num_decode_tokens
    while not stop.wait(5.0):
        tell({"tokens": executor.stats.num_decode_tokens - before, "seconds": round(time.monotonic() - started, 2)})


def pairs(text: str, sign: str) -> Iterator[tuple[int, int]]:
    for item in filter(None, text.split(",")):
        first, second = item.split(sign)
        yield int(first), int(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="parallel-results")
    parser.add_argument("--seconds", type=float, default=150.0, help="in all")
    parser.add_argument("--gpus", type=int, default=0, help="0: all that are here")
    one = parser.add_argument_group("one engine")
    one.add_argument("--engine", help="a folder with a config.json")
    one.add_argument("--name", default="")
    one.add_argument("--tensor-parallel", type=int, default=1)
    one.add_argument("--quantize")
    one.add_argument("--latency", default="")
    one.add_argument("--throughput", default="")
    one.add_argument("--max-batch", type=int, default=64)
    one.add_argument("--nccl", action="store_true", help="without peers' memory")
    one.add_argument("--json", default="parallel.jsonl")
    args = parser.parse_args()
    if args.engine:
        measure(args)
        return
    ends = time.monotonic() + args.seconds
    import torch

    gpus, out = args.gpus or torch.cuda.device_count(), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    run_rounds(plan(gpus), gpus, out, ends)


if __name__ == "__main__":
    main()
