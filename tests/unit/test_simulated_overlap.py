"""With overlap, a simulated replica admits a request when the executor would: into the step after the one that was launched already.

The launch of a step that is not captured delays the tokens of the step before.
"""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Simulator
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import Arrival

TIMES = StepTimes(fixed_s=0.01, row_s=0.001, prefill_token_s=0.0001, context_token_s=0.00001, prefill_fixed_s=0.005)
LAUNCHED = StepTimes(
    fixed_s=0.01, row_s=0.001, prefill_token_s=0.0001, context_token_s=0.00001, captured_tokens=(16, 48), captured_rows=6, launch_s=0.02,
    captured_points=((8, 0.006), (32, 0.007)), prefill_points=((100, 0.012),),
)  # fmt: skip
REPLICA = ReplicaSettings(max_batch_size=64, max_num_tokens=128, kv_cache_tokens=64_000, tokens_per_block=16)


def arrivals(seed: int, count: int, rate: float) -> list[Arrival]:
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += dice.expovariate(rate)
        found.append(Arrival(now, [dice.randrange(1 << 20) for _ in range(dice.randrange(1, 200))], dice.choice([1, 2, 3, 30])))
    return found


def seconds(times: StepTimes, plan: StepPlan) -> tuple[float, float]:
    """(seconds of the device, seconds of the host) for a step."""
    decodes_s = times.fixed_s + times.row_s * plan.num_decodes + times.context_token_s * sum(plan.starts)
    if not (tokens := plan.num_prefill_tokens):
        return decodes_s, 0.0
    if times is TIMES:
        return decodes_s + times.prefill_fixed_s + times.prefill_token_s * tokens, 0.0
    total, is_captured = plan.num_decodes + tokens, plan.num_decodes + tokens <= 48 and len(plan) <= 6
    padded = (next(size for size in (16, 48) if size >= total) if is_captured else total) - plan.num_decodes
    points = [(0, 0.0), *(times.captured_points if is_captured else times.prefill_points)]
    prefill_s = float(np.interp(padded, *zip(*points, strict=True))) + times.prefill_token_s * max(padded - points[-1][0], 0)
    return decodes_s + prefill_s, 0.0 if is_captured else 0.02


def step_loop(times: StepTimes, requests: list[Arrival], depth: int) -> tuple[dict[int, list[float]], list[float]]:
    """(time to the first token, duration) of each request and the times between tokens, from a loop as that of `Executor.turn`."""
    scheduler = Scheduler(num_blocks=4000, tokens_per_block=16, max_batch_size=64, max_num_tokens=128, max_seq_len=64_000)
    waiting, in_flight, found = deque(enumerate(requests)), deque[tuple[StepPlan, float]](), dict[int, list[float]]()
    now = device_free_s = 0.0
    newest, gaps = dict[int, float](), list[float]()
    while waiting or scheduler.has_work:
        while waiting and waiting[0][1].at_s <= now:
            number, arrival = waiting.popleft()
            params = SamplingParams(max_tokens=arrival.max_tokens, seed=0)
            request = TokenRequest(request_id=str(number), prompt_ids=arrival.prompt_ids, params=params)
            scheduler.add(Sequence(number, request, 0, arrival.at_s))
        plan = scheduler.plan(now)
        if len(plan):
            device_s, launch_s = seconds(times, plan)
            device_free_s = max(max(now, device_free_s) + device_s, now + launch_s)
            now += launch_s
            in_flight.append((plan, device_free_s))
        if in_flight and (len(in_flight) >= depth or not len(plan)):
            plan, end_s = in_flight.popleft()
            now = max(now, end_s)
            outcome = scheduler.commit(plan, [[7] if samples else [] for samples in plan.samples])
            for seq in outcome.sequences:
                found.setdefault(seq.seq_id, [now - seq.arrival])
                if seq.seq_id in newest:
                    gaps.append(now - newest[seq.seq_id])
                newest[seq.seq_id] = now
            for seq in outcome.finished:
                found[seq.seq_id].append(now - seq.arrival)
        elif not in_flight and waiting:
            now = max(now, waiting[0][1].at_s)
    return found, gaps


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40), st.sampled_from([3.0, 10.0, 40.0]), st.booleans(), st.sampled_from([TIMES, LAUNCHED]))
def test_requests_join_the_steps_that_the_step_loop_would_give_them(
    seed: int, count: int, rate: float, overlap: bool, times: StepTimes
) -> None:
    requests = arrivals(seed, count, rate)
    replica = ReplicaSettings(max_batch_size=64, max_num_tokens=128, kv_cache_tokens=64_000, tokens_per_block=16, overlap=overlap)
    results = Simulator(1, replica, times).run(requests)
    expected, gaps = step_loop(times, requests, 2 if overlap else 1)
    pairs = zip(results.first_token_s, results.duration_s, strict=True)
    # Requests whose first tokens differ by a rounding error only are in the order of their durations.
    found, wanted = ([value for pair in sorted((round(first, 9), last) for first, last in each) for value in pair]
                     for each in (pairs, expected.values()))  # fmt: skip
    assert found == pytest.approx(wanted)
    between = results.between_tokens_s
    assert between.count == len(gaps) and between.total_s == pytest.approx(sum(gaps), abs=2e-6 * len(gaps))
    for percent in (50, 90) if gaps else ():
        expected_s = sorted(gaps)[max(0, math.ceil(len(gaps) * percent / 100) - 1)]
        assert between.percentile(percent) == pytest.approx(max(expected_s, 1e-6), rel=1e-3)


def test_a_request_waits_for_the_step_that_was_launched_before_it_arrived() -> None:
    """It arrives in the first decode of another one. The second decode is launched then, and the third one computes its prompt."""
    first, second = Arrival(0.0, [1] * 64, 9), Arrival(0.03, [2] * 32, 1)
    decodes = [0.01 + 0.001 + context * 0.00001 for context in (64, 65, 66)]
    prefill = 0.01 + 0.005 + 64 * 0.0001
    assert prefill < 0.03 < prefill + decodes[0]
    results = Simulator(1, REPLICA, TIMES).run([first, second])
    assert math.isclose(results.first_token_s[0], prefill + sum(decodes) + 0.005 + 32 * 0.0001 - 0.03)
