"""Simulated step times: padding of captured steps, measured points, launches of steps that are not captured, and wrong files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.schedule.group_scheduler import GroupPlan
from stoker.simulation.frontend import Frontend, FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.running_steps import RunningSteps
from stoker.simulation.simulator import Simulator
from stoker.simulation.step_times import StepTimes, read_step_times
from stoker.simulation.traces import Arrival

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LINE: dict[str, Any] = {"fixed_s": 0.01, "row_s": 0.001, "prefill_token_s": 0.0001, "context_token_s": 0.0}
POINTS = ((20, 0.004), (60, 0.005), (100, 0.009))
CAPTURED = StepTimes(
    **LINE, captured_tokens=(32, 64), captured_rows=8, captured_points=POINTS[:2], prefill_points=((50, 0.004), (100, 0.009)), launch_s=0.03
)


def plan(prefill_tokens: int, decodes: int, prompts: int = 1) -> GroupPlan:
    found = GroupPlan()
    found.num_decodes, found.num_prefill_tokens = decodes, prefill_tokens
    found.sequences = [None] * (prompts if prefill_tokens else 0)  # type: ignore[list-item]
    return found


@pytest.mark.parametrize(
    ("prefill_tokens", "decodes", "added_s", "launch_s"),
    [
        (0, 4, 0.0, 0.0),
        (1, 4, 0.004 + 0.001 * 8 / 40, 0.0),  # padded to 32 - 4 tokens
        (28, 4, 0.004 + 0.001 * 8 / 40, 0.0),
        (29, 4, 0.005, 0.0),  # to 64 - 4
        (60, 4, 0.005, 0.0),
        (64, 0, 0.005 + 4 * 0.0001, 0.0),  # beyond the last point of captured steps
        (61, 4, 0.004 + 0.001 * 11 / 10, 0.03),  # not captured, and not padded
        (150, 0, 0.009 + 50 * 0.0001, 0.03),  # beyond the last point
        (26, 6, 0.004 + 0.001 * 6 / 40, 0.0),
        (10, 8, 0.0008, 0.03),  # nine rows; a fifth of the first point
    ],
)
def test_prompts_add_the_time_of_the_padded_size(prefill_tokens: int, decodes: int, added_s: float, launch_s: float) -> None:
    step = plan(prefill_tokens, decodes)
    first_s, growth_s = CAPTURED.series(step)
    assert first_s == pytest.approx(0.01 + 0.001 * decodes + added_s) and growth_s == 0
    assert (CAPTURED.launch_time_s(step) if prefill_tokens else 0.0) == launch_s


def test_without_points_padding_is_proportional_and_without_sizes_every_prompt_is_launched() -> None:
    padded = StepTimes(**LINE, captured_tokens=(32,), prefill_fixed_s=0.002)
    assert padded.series(plan(5, 2))[0] == pytest.approx(0.01 + 0.002 + 0.002 + 30 * 0.0001)
    assert padded.launch_time_s(plan(50, 2)) == 0
    assert StepTimes(**LINE, launch_s=0.02).launch_time_s(plan(1, 0)) == 0.02


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"launch_s": -1.0}, "launch_s=-1.0"),
        ({"captured_tokens": [64, 32]}, "captured_tokens="),
        ({"captured_tokens": [0, 32]}, "captured_tokens="),
        ({"captured_rows": 0}, "captured_rows=0"),
        ({"prefill_points": [[10, 0.1], [10, 0.2]]}, "prefill_points="),
        ({"prefill_points": [[10, 4000.0]]}, "prefill_points: 10=4000.0"),
        ({"prefill_points": [[10, 0.1]], "prefill_fixed_s": 0.1}, "prefill_fixed_s=0.1 is refused beside prefill_points"),
        ({"captured_tokens": [32], "captured_points": [[9, 0.1], [8, 0.1]]}, "captured_points="),
        ({"captured_points": [[10, 0.1]]}, "captured_points have no effect"),
        ({"prefill_points": [[10]]}, "prefill_points"),
        ({"launch": 0.1}, "launch"),
    ],
)
def test_wrong_files_name_the_member(wrong: dict[str, object], named: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({**LINE, **wrong}))
    with pytest.raises(ConfigError, match=named):
        read_step_times(file)


def test_the_step_times_of_results_can_be_read() -> None:
    files = list(RESULTS.glob("*_step_times.json"))
    assert len(files) > 3 and all(read_step_times(file).source for file in files)
    times = read_step_times(RESULTS / "h200_llama8b_fp8kv_step_times.json")
    assert times.series(plan(1024, 128))[0] == times.series(plan(1100, 128))[0]
    assert not times.launch_time_s(plan(1920, 128)) and times.launch_time_s(plan(1921, 128)) > 0.02


def test_a_launch_delays_the_tokens_of_the_step_before() -> None:
    """A request decodes in steps of 11 ms from 30 ms on. Another one arrives at 43 ms, and the host launches its prompt from 52 to 82 ms.

    The tokens of the decode that ends at 63 ms are sent at 82 ms. The device computes the prompt from 63 to 84 ms.
    """
    times = StepTimes(**LINE, launch_s=0.03)
    replica = ReplicaSettings(max_batch_size=8, max_num_tokens=128, kv_cache_tokens=8192, tokens_per_block=16)
    results = Simulator(1, replica, times).run([Arrival(0.0, [1] * 40, 9), Arrival(0.043, [2] * 100, 1)])
    assert sorted(results.first_token_s) == pytest.approx([0.03, 0.084 - 0.043])
    gaps = results.between_tokens_s
    assert (gaps.count, gaps.total_s) == (8, pytest.approx(6 * 0.011 + 0.03 + 0.002))
    assert (gaps.min_s, gaps.max_s) == (pytest.approx(0.002), pytest.approx(0.03))
    assert gaps.percentile(50) == pytest.approx(0.011, rel=1e-3)


def test_without_overlap_a_launch_is_a_part_of_its_step() -> None:
    times = StepTimes(**LINE, launch_s=0.03)
    replica = ReplicaSettings(max_batch_size=8, max_num_tokens=128, kv_cache_tokens=8192, tokens_per_block=16, overlap=False)
    results = Simulator(1, replica, times).run([Arrival(0.0, [1] * 40, 3), Arrival(0.035, [2] * 100, 1)])
    assert sorted(results.first_token_s) == pytest.approx([0.03, 0.03 + 0.011 + 0.03 - 0.035])
    assert sorted(results.duration_s) == pytest.approx([0.071 - 0.035, 0.071])


def test_a_request_is_received_while_the_host_launches() -> None:
    """The tokens of the step before are not sent yet, so that it does not wait for them; a later one does."""
    frontend = Frontend(FrontendTimes(frontend_request_ms=3.0, frontend_token_us=500.0))
    steps = RunningSteps(plan(100, 4), 1.0, 0.05, 0.0)
    steps.launch(1.03, overlap=True)
    assert frontend.send(steps.launched_s, 4) == pytest.approx((1.032, 1.032))
    assert [frontend.receive(at_s, steps) for at_s in (1.01, 1.012)] == pytest.approx([1.013, 1.016])
    assert frontend.receive(1.0305, steps) == pytest.approx(1.035)


def test_no_request_is_lost_with_launches_and_transfers() -> None:
    dice = random.Random(0)
    arrivals = [Arrival(i * 0.004, [dice.randrange(1000) for _ in range(dice.randrange(10, 250))], 1 + i % 9) for i in range(200)]
    replica = ReplicaSettings(max_batch_size=16, max_num_tokens=128, kv_cache_tokens=8192, tokens_per_block=16)
    frontend = FrontendTimes(frontend_request_ms=1.0, frontend_token_us=100.0)
    results = Simulator(2, replica, CAPTURED, RoutingSettings(disaggregate_tokens=64), 2, frontend=frontend).run(arrivals)
    assert len(results.first_token_s) == len(results.duration_s) == 200 and len(results.transfer_s) > 50
    assert results.num_output_tokens == sum(arrival.max_tokens for arrival in arrivals)
    assert results.between_tokens_s.count == results.num_output_tokens - 200
    assert all(duration >= first for duration, first in zip(results.duration_s, results.first_token_s, strict=True))
    assert math.isfinite(results.between_tokens_s.max_s) and results.between_tokens_s.min_s > 0
