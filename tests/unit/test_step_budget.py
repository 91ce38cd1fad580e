"""Latency targets: steps stay below the target at little cost in throughput, prompts proceed, and late prompts wait behind others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.runtime.schedule.step_budget import FIRST_PREFILL, MIN_PREFILL, StepBudget
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes, read_step_times
from stoker.simulation.traces import Arrival

MEASURED = read_step_times(Path(__file__).parents[2] / "benchmarks/results/h200_llama8b_fp8_step_times.json")
DICE = random.Random(0)


class NoisyTimes(StepTimes, frozen=True):
    """Step times with a random error of 5 %."""

    def of(self, plan: object) -> float:
        return super().of(plan) * DICE.lognormvariate(0.0, 0.05)  # type: ignore[arg-type]


def simulate(rate: float, count: int = 400, generated: int = 128, **targets: float) -> Results:
    """Poisson arrivals of `rate` requests per second with 1,000 prompt tokens, on one replica of an 8B model."""
    DICE.seed(1)
    dice, now, arrivals = random.Random(0), 0.0, []
    for _ in range(count):
        now += dice.expovariate(rate)
        arrivals.append(Arrival(now, [dice.randrange(100_000) for _ in range(1000)], generated))
    times = NoisyTimes(**{name: getattr(MEASURED, name) for name in ("fixed_s", "row_s", "prefill_token_s", "context_token_s")})
    return Simulator(1, ReplicaSettings(**targets), times).run(arrivals)  # type: ignore[arg-type]


def percentile(values: object, percent: int) -> float:
    ordered = sorted(values)  # type: ignore[call-overload]
    return float(ordered[len(ordered) * percent // 100])


def test_99_of_100_tokens_reach_the_target_at_little_cost_in_throughput() -> None:
    free, limited = simulate(40.0), simulate(40.0, target_itl_ms=30.0)
    assert percentile(free.between_tokens_s, 99) > 0.06
    assert percentile(limited.between_tokens_s, 99) <= 0.030
    assert limited.end_s < 1.02 * free.end_s and limited.num_output_tokens == free.num_output_tokens


def test_a_target_of_the_first_token_alone_spreads_prompts_over_steps() -> None:
    free, paced = simulate(20.0, 200), simulate(20.0, 200, target_ttft_ms=500.0)
    assert percentile(paced.first_token_s, 99) <= 0.5
    assert percentile(paced.between_tokens_s, 99) < 0.6 * percentile(free.between_tokens_s, 99)


def test_prompts_that_are_late_wait_behind_those_that_can_reach_the_target() -> None:
    def in_time(results: Results) -> int:
        return sum(seconds <= 0.5 for seconds in results.first_token_s)

    free, limited = simulate(50.0, 600, 256), simulate(50.0, 600, 256, target_itl_ms=30.0, target_ttft_ms=500.0)
    assert in_time(limited) > 1.5 * in_time(free) and len(limited.duration_s) == len(free.duration_s)
    assert max(limited.first_token_s) < max(free.first_token_s) + 5.1, "a late prompt waits as if it had arrived 10 targets later"


def test_the_limit_grows_from_measurements_and_never_stops_prompts() -> None:
    budget = StepBudget(8192, target_itl_s=0.030)
    assert budget.num_tokens(0, 5000, 0.0, 0.0) == 8192, "no decode waits"
    assert budget.num_tokens(4, 5000, 0.0, 0.0) == 4 + FIRST_PREFILL
    for _ in range(50):
        budget.record(4, 0, 0.004)
        budget.record(4, FIRST_PREFILL, 0.004 + FIRST_PREFILL * 1e-5)
    assert budget.num_tokens(4, 5000, 0.0, 0.0) == 4 + 2 * FIRST_PREFILL, "at most twice as many as were measured"
    for _ in range(50):
        budget.record(4, 2048, 0.004 + 2048 * 1e-5)
    assert budget.num_tokens(4, 5000, 0.0, 0.0) == pytest.approx(4 + 2600, abs=5)
    for _ in range(50):
        budget.record(4, 0, 0.050)
    assert budget.num_tokens(4, 5000, 0.0, 0.0) == 4 + MIN_PREFILL, "the decodes alone exceed the target"


def test_pipeline_stages_divide_the_target_and_an_outlier_counts_little() -> None:
    one, two = StepBudget(8192, target_itl_s=0.030), StepBudget(8192, target_itl_s=0.030, num_stages=2)
    for _ in range(50):
        for budget in (one, two):
            budget.record(4, 0, 0.004)
            budget.record(4, 1024, 0.004 + 1024 * 1e-5)
    assert two.num_tokens(4, 5000, 0.0, 0.0) == pytest.approx(1100, abs=10)
    before = two.num_tokens(4, 5000, 0.0, 0.0)
    two.record(4, 1024, 10.0)
    assert before / 8 < two.num_tokens(4, 5000, 0.0, 0.0) < before
    for _ in range(60):
        two.record(4, 1024, 0.004 + 1024 * 1e-5)
    assert two.num_tokens(4, 5000, 0.0, 0.0) > 0.9 * before


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"target_itl_ms": 0.0}, "target_itl_ms=0.0 is refused"),
        ({"target_ttft_ms": float("nan")}, "target_ttft_ms=nan is refused"),
        ({"target_itl_ms": 5.0, "chunked_prefill": False}, "target_itl_ms=5.0 needs chunked_prefill"),
    ],
)
def test_targets_without_an_effect_are_refused(settings: dict[str, float], text: str) -> None:
    from stoker.base.config import RuntimeConfig

    with pytest.raises(ConfigError, match=text):
        RuntimeConfig(**settings)  # type: ignore[arg-type]
