"""Simulates what latency targets cost and achieve, with the real scheduler and measured step times. Needs no GPU.

    PYTHONPATH=src python benchmarks/latency_targets.py [--json benchmarks/results/latency_targets.json]

One replica of the 8B model in FP8 on an H200; the times of steps are those of h200_llama8b_fp8_step_times.json with a random error of 5 %.
Requests arrive in a Poisson process with 256 generated tokens: `fixed` has prompts of 1,000 tokens, `mixed` of 1,000 × a log-normal number
(sigma 0.8).
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from stoker.cli.benchmark.results import percentile, provenance
from stoker.runtime.schedule.group_scheduler import GroupPlan
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Simulator
from stoker.simulation.step_times import StepTimes, read_step_times
from stoker.simulation.traces import Arrival

STEP_TIMES = Path(__file__).parent / "results" / "h200_llama8b_fp8_step_times.json"
RATES = (20.0, 30.0, 40.0, 45.0, 50.0)
TARGETS: tuple[dict[str, float], ...] = (
    {}, {"target_itl_ms": 30.0}, {"target_itl_ms": 15.0}, {"target_ttft_ms": 500.0}, {"target_itl_ms": 30.0, "target_ttft_ms": 500.0},
)  # fmt: skip
NUM_REQUESTS, PROMPT, GENERATED = 1500, 1000, 256
ERRORS = random.Random()


class NoisyTimes(StepTimes, frozen=True):
    """Step times with a random error of 5 %, which the steps of a series have in common."""

    def series(self, plan: GroupPlan) -> tuple[float, float]:
        first_s, growth_s = super().series(plan)
        return first_s * ERRORS.lognormvariate(0.0, 0.05), growth_s


def arrivals(trace: str, rate: float) -> list[Arrival]:
    dice, now, found = random.Random(0), 0.0, []
    for _ in range(NUM_REQUESTS):
        now += dice.expovariate(rate)
        length = PROMPT if trace == "fixed" else min(max(1, int(PROMPT * dice.lognormvariate(0.0, 0.8))), 16_000)
        found.append(Arrival(now, [dice.randrange(100_000) for _ in range(length)], GENERATED))
    return found


def measure(trace: str, rate: float, targets: dict[str, float]) -> dict[str, Any]:
    ERRORS.seed(1)
    times = NoisyTimes(**msgspec.structs.asdict(read_step_times(STEP_TIMES)))
    results = Simulator(1, ReplicaSettings(**targets), times).run(arrivals(trace, rate))  # type: ignore[arg-type]
    first = sorted(results.first_token_s)
    in_time = sum(seconds <= 0.5 for seconds in first)
    return {
        "trace": trace, "requests_per_s": rate, **targets, "tokens_per_s": round(results.num_output_tokens / results.end_s),
        "first_token_ms": {f"p{p}": round(1e3 * percentile(first, p), 1) for p in (50, 99)},
        "inter_token_ms": {f"p{p}": round(1e3 * results.between_tokens_s.percentile(p), 1) for p in (50, 99)},
        "first_token_within_500_ms": round(in_time / NUM_REQUESTS, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for trace, rate, targets in product(("fixed", "mixed"), RATES, TARGETS):
        rows.append(measure(trace, rate, targets))
        print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        about = {"what": "simulated; the step times were measured on an H200", "step_times": STEP_TIMES.name, **provenance()}
        args.json.write_text(json.dumps({**about, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
