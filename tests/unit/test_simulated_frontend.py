"""The time of router and HTTP server in simulations: before the executor, after the step, and while other tokens are sent."""

from __future__ import annotations

import random

import pytest

from stoker.base.errors import ConfigError
from stoker.router.core.settings import RoutingSettings
from stoker.simulation.frontend import FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import Arrival

STEP = StepTimes(fixed_s=0.01, row_s=0.0, prefill_token_s=0.0001, context_token_s=0.0)
REPLICA = ReplicaSettings(max_batch_size=8, max_num_tokens=256, kv_cache_tokens=8192, tokens_per_block=16, overlap=False)
TIMES = FrontendTimes(frontend_request_ms=3.0, frontend_first_token_ms=2.0, frontend_token_us=500.0)


def run(arrivals: list[Arrival], frontend: FrontendTimes = TIMES) -> Results:
    return Simulator(1, REPLICA, STEP, frontend=frontend).run(arrivals)


def test_the_way_of_one_request() -> None:
    """3 ms to the executor, a step with 100 prompt tokens, the time of a token and 2 ms; the last one comes two steps later."""
    results = run([Arrival(1.0, [1] * 100, 3)])
    assert list(results.first_token_s) == pytest.approx([0.003 + 0.02 + 0.0005 + 0.002])
    assert list(results.duration_s) == pytest.approx([0.003 + 0.04 + 0.0005])
    assert list(results.token_s) == pytest.approx([(0.02 - 0.002) / 2])
    assert list(run([Arrival(1.0, [1] * 100, 1)]).duration_s) == pytest.approx([0.003 + 0.02 + 0.0005 + 0.002])


def test_a_request_waits_for_the_requests_before_it() -> None:
    """The executor receives the second one at 6 ms, in the first step, which ends at 14 ms; the second step decodes, too."""
    results = run([Arrival(0.0, [1] * 10, 2), Arrival(0.0, [2] * 10, 1)])
    assert sorted(results.first_token_s) == pytest.approx([0.003 + 0.011 + 0.0005 + 0.002, 0.003 + 0.022 + 2 * 0.0005 + 0.002])


@pytest.mark.parametrize(("after_s", "waits_s"), [(0.0005, 0.0015), (0.0025, 0.0), (0.0105, 0.0015)])
def test_a_request_waits_for_the_tokens_of_the_last_step(after_s: float, waits_s: float) -> None:
    """Four rows decode from the step on that begins at 24 ms; a request arrives after the end of one of its series' steps."""
    slow = FrontendTimes(frontend_token_us=500.0)
    first = [Arrival(0.0, [i] * 25, 40) for i in range(4)]
    begin = 0.01 + 100 * 0.0001
    simulator = Simulator(1, REPLICA, STEP, frontend=slow)
    simulator.add_all([*first, Arrival(begin + 0.01 + after_s, [9] * 10, 1)])
    at_s = min(time for time, _, event in simulator._events if isinstance(event, tuple))
    assert at_s == pytest.approx(begin + 0.01 + after_s + waits_s)
    assert len(simulator.finish().first_token_s) == 5


def test_no_request_is_lost_and_tokens_are_counted_with_transfers() -> None:
    dice = random.Random(0)
    arrivals = [Arrival(i * 0.004, [dice.randrange(1000) for _ in range(dice.randrange(10, 250))], 1 + i % 9) for i in range(200)]
    results = Simulator(2, REPLICA, STEP, RoutingSettings(disaggregate_tokens=64), 2, frontend=TIMES).run(arrivals)
    assert len(results.first_token_s) == len(results.duration_s) == 200 and len(results.transfer_s) > 50
    assert results.num_output_tokens == sum(arrival.max_tokens for arrival in arrivals)
    assert min(results.token_s) >= 0 and all(d >= f for d, f in zip(results.duration_s, results.first_token_s, strict=True))


def test_impossible_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="frontend_token_us=-1 is refused"):
        FrontendTimes(frontend_token_us=-1)
