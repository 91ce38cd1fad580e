"""Measures several GPUs of one host within a time limit: the all-reduce, then engines by the number of tensor-parallel ranks.

    PYTHONPATH=src python benchmarks/parallel.py --out results --seconds 200

One process builds the engines with their kernels in the order of the steps. Steps start in order, each as soon as its engine and adjacent
GPUs are available. Each result is written to results/parallel.jsonl immediately, so that an interrupted run leaves complete lines. Each
step has its own log. A step that cannot end in time is not started, or is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to build: a folder of benchmarks/models, its quantization and the number of ranks."""

    model: str
    gpus: int
    quantization: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-{self.quantization or 'bf16'}-tp{self.gpus}"


@dataclass(slots=True)
class Step:
    """One process on adjacent GPUs, which measures an engine or the all-reduce."""

    name: str
    gpus: int
    seconds: float  # limit
    needs: float  # seconds that must be left to start it
    command: list[str] = field(default_factory=list)
    engine: Engine | None = None


def engine_step(name: str, engine: Engine, seconds: float, *more: str) -> Step:
    """A step of parallel_engine.py."""
    return Step(name, engine.gpus, seconds, 25.0, [str(HERE / "parallel_engine.py"), "--name", name, *more], engine)


def plan(gpus: int) -> list[Step]:
    """The steps that fit on `gpus` GPUs, the most important first."""
    widths = ",".join(str(n) for n in (8, 4, 2) if n <= gpus)
    small, large = "llama-3.1-8b", "llama-3.1-70b"
    both = ("--latency", "1x1000,64x1000")
    steps = [
        Step("all-reduce", gpus, 50, 15, [str(HERE / "kernels" / "all_reduce.py"), "--ranks", widths]),
        engine_step("8b bf16 tp4", Engine(small, 4), 45, *both, "--breakdown", "1x1000"),
        engine_step("8b bf16 tp2", Engine(small, 2), 45, *both),
        engine_step("8b bf16 tp2, nccl alone", Engine(small, 2), 45, *both, "--nccl"),
        engine_step("70b fp8 tp8", Engine(large, 8, "FP8_KV"), 120, *both, "--throughput", "1000/1000:768", "--max-batch", "768"),
        engine_step("70b fp8 tp4", Engine(large, 4, "FP8_KV"), 60, *both, "--breakdown", "1x1000"),
        engine_step("70b fp8 tp2", Engine(large, 2, "FP8_KV"), 150, *both, "--throughput", "1000/1000:256", "--max-batch", "256"),
        engine_step("70b fp8 tp1", Engine(large, 1, "FP8_KV"), 70, *both),
        engine_step("8b bf16 tp1", Engine(small, 1), 45, "--latency", "1x1000,8x1000,64x1000"),
        engine_step("70b fp8 tp2, load", Engine(large, 2, "FP8_KV"), 150, "--throughput", "128/2048:256", "--max-batch", "256"),
        engine_step(
            "mixtral fp8 tp2, load", Engine("mixtral-8x7b", 2, "FP8_KV"), 150, "--throughput", "1000/1000:384", "--max-batch", "384"
        ),
    ]
    return [step for step in steps if step.gpus <= gpus and (step.engine is not None or gpus > 1)]


class Runner:
    """Starts steps in order, and stops those that exceed their limit."""

    def __init__(self, gpus: int, out: Path, engines: Path, ends: float) -> None:
        self.out, self.engines, self.ends = out, engines, ends
        self.free = set(range(gpus))
        self.running: list[tuple[Step, range, subprocess.Popen[bytes], float]] = []

    def run(self, steps: list[Step]) -> None:
        waiting = deque(steps)
        builder = self._build(steps)
        while waiting or self.running:
            self._reap()
            if waiting and self._is_settled(waiting[0], builder):
                waiting.popleft()
            else:
                time.sleep(POLL_S)
        end(builder)

    def _is_settled(self, step: Step, builder: subprocess.Popen[bytes]) -> bool:
        """Whether `step` was started or is skipped."""
        left = self.ends - time.monotonic()
        builder_ended = builder.poll() is not None
        built = step.engine is None or (self._folder(step.engine) / "config.json").exists()
        if left < step.needs or (builder_ended and not built):
            print(f"{step.name}: skipped, {f'{left:.0f} s are left' if built else 'its engine was not built; see build.log'}", flush=True)
            return True
        place = next((place for place in self._places(step.gpus) if self.free.issuperset(place)), None)
        if not built or place is None:
            return False
        self.free -= set(place)
        self.running.append((step, place, self._begin(step, place), time.monotonic() + min(step.seconds, left)))
        return True

    def _places(self, gpus: int) -> list[range]:
        count = len(self.free) + sum(len(place) for _, place, _, _ in self.running)
        return [range(first, first + gpus) for first in range(0, count - gpus + 1, gpus)]

    def _reap(self) -> None:
        for entry in list(self.running):
            step, place, process, deadline = entry
            code = process.poll()
            if code is None and time.monotonic() < deadline:
                continue
            end(process)
            self.running.remove(entry)
            self.free |= set(place)
            state = "ended" if code == 0 else f"stopped or failed ({code}); see its log"
            print(f"{step.name} on {','.join(map(str, place))}: {state}", flush=True)

    def _begin(self, step: Step, place: range) -> subprocess.Popen[bytes]:
        command = [*step.command, "--json", str(self.out / "parallel.jsonl")]
        if step.engine is not None:
            command += ["--engine", str(self._folder(step.engine))]
        return start(command, self.out / f"{step.name.replace(' ', '_').replace(',', '')}.log", place)

    def _build(self, steps: list[Step]) -> subprocess.Popen[bytes]:
        """The process that builds every engine once."""
        engines = dict.fromkeys(step.engine for step in steps if step.engine is not None)
        builds = [f"{e.model}:{e.gpus}:{e.quantization or ''}:{self._folder(e)}" for e in engines]
        return start([str(HERE / "parallel_engine.py"), "--build", *builds], self.out / "build.log", range(1))

    def _folder(self, engine: Engine) -> Path:
        return self.engines / engine.name


def start(command: list[str], log: Path, gpus: range) -> subprocess.Popen[bytes]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, env=environment, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="parallel-results")
    parser.add_argument("--seconds", type=float, default=200.0, help="limit of the whole run")
    parser.add_argument("--gpus", type=int, default=0, help="0: all GPUs of the host")
    args = parser.parse_args()
    ends = time.monotonic() + args.seconds
    gpus, out = args.gpus or _num_gpus(), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as engines:
        Runner(gpus, out, Path(engines), ends).run(plan(gpus))


def _num_gpus() -> int:
    from torch import cuda

    return cuda.device_count()


if __name__ == "__main__":
    main()
