"""The scheduler of data-parallel ranks: where sequences are placed, and that any load ends with the right tokens and free blocks."""

from __future__ import annotations

import random

import pytest
from stub_device import reference

from stoker.base.types import FinishReason, SamplingParams
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule.data_parallel import DataParallelScheduler
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.step_history import StepHistory

ROWS = 4


def data_parallel(num_ranks: int = 3, policy: str = "guaranteed_no_evict", **changes: object) -> DataParallelScheduler:
    config = {"num_blocks": 24, "tokens_per_block": 4, "max_batch_size": ROWS, "max_num_tokens": 16, "max_seq_len": 64} | changes
    return DataParallelScheduler(lambda first: Scheduler(first_row=first, policy=policy, **config), num_ranks, ROWS, policy)  # type: ignore[arg-type]


def sequences_of(number: int, prompt: list[int], *, now: float = 0.0, timeout_s: float | None = None, **params: object) -> list[Sequence]:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    request = TokenRequest(request_id=f"r{number}", prompt_ids=prompt, params=settings, timeout_s=timeout_s)
    return [Sequence(number * 10 + index, request, index, now) for index in range(settings.n)]


def step(target: DataParallelScheduler, token: int = 5) -> StepPlan:
    plan = target.plan(0.0)
    if plan.sequences:
        target.commit(plan, [[token] if samples else [] for samples in plan.samples])
    return plan


def test_a_step_has_a_part_for_each_rank_and_sequences_are_spread() -> None:
    target = data_parallel()
    for number in range(2):
        target.add(*sequences_of(number, [number] * 6, max_tokens=8))
    plan = step(target)
    assert [len(part) for part in plan.parts] == [1, 1, 0] and plan.num_tokens == 12
    assert [seq.rank for seq in plan.sequences] == [0, 1] and [seq.row for seq in plan.sequences] == [0, ROWS]


def test_a_rank_with_the_prefix_is_preferred_unless_it_has_much_more_work() -> None:
    target = data_parallel(num_blocks=200, max_num_tokens=512, max_seq_len=600, max_batch_size=ROWS)
    shared = [1] * 400
    for number, expected in enumerate((0, 0, 0, 0, 1)):  # rank 0 has the prefix, until its rows are taken
        target.add(*sequences_of(number, [*shared, number], max_tokens=8))
        plan = step(target)
        (new,) = [seq for seq in plan.sequences if seq.request_id == f"r{number}"]
        assert (new.rank, new.num_cached) == (expected, 400 if number and not expected else 0)
    short = data_parallel(num_blocks=200, max_num_tokens=512, max_seq_len=600, max_batch_size=ROWS)
    for number in range(3):  # 100 cached tokens cost less than one more sequence
        short.add(*sequences_of(number, [*[1] * 100, number], max_tokens=8))
        step(short)
    assert sorted(seq.rank for seq in short.running()) == [0, 1, 2]


def test_a_sequence_waits_in_the_common_queue_until_a_rank_has_room() -> None:
    target = data_parallel(num_ranks=2, num_blocks=4)
    for number in range(3):
        target.add(*sequences_of(number, [number] * 10, max_tokens=4))
    plan = step(target)
    assert [len(part) for part in plan.parts] == [1, 1] and target.num_waiting == 1 and target.waiting(9)[0].rank == -1
    target.cancel("r1")
    assert [seq.request_id for seq in step(target).parts[1].sequences] == ["r2"], "it takes the place of the cancelled one, on rank 1"


def test_a_waiting_sequence_ends_at_its_deadline_or_when_it_is_cancelled() -> None:
    target = data_parallel(num_ranks=1, num_blocks=4)
    target.add(*sequences_of(0, [1] * 10, max_tokens=4))
    step(target)
    for number, timeout_s in ((1, 5.0), (2, None)):
        target.add(*sequences_of(number, [number] * 10, max_tokens=4, timeout_s=timeout_s))
    target.plan(0.0)
    assert target.expire(4.9) == [] and [seq.finish_reason for seq in target.expire(5.0)] == [FinishReason.DEADLINE]
    assert [seq.finish_reason for seq in target.cancel("r2")] == [FinishReason.CANCELLED]
    assert target.num_waiting == 0 and target.request_ids() == ["r0"] and "r1" not in target


def test_the_history_of_steps_has_decodes_before_prefills() -> None:
    target, history = data_parallel(num_ranks=2), StepHistory()
    target.add(*sequences_of(0, [1] * 10, max_tokens=8))
    step(target)
    target.add(*sequences_of(1, [2] * 3, max_tokens=8))
    step(target)
    target.add(*sequences_of(2, [3] * 7, max_tokens=8))
    plan = step(target)
    assert [len(part) for part in plan.parts] == [2, 1] and plan.prefill_rows == [1]
    history.end_step(0.0)
    history.record(plan)
    (record,) = history.steps()
    assert (record.seq_ids, record.num_decodes, record.num_verifies, record.num_new) == ([0, 10, 20], 2, 0, [7])


@pytest.mark.parametrize("seed", range(12))
def test_any_load_ends_with_the_right_tokens_and_free_blocks(seed: int) -> None:
    draw = random.Random(seed)
    policy = draw.choice(("guaranteed_no_evict", "max_utilization", "static"))
    target = data_parallel(num_ranks=draw.choice((1, 2, 4)), policy=policy, num_blocks=draw.choice((16, 24)))
    known: list[Sequence] = []
    wrong: set[int] = set()
    in_flight: list[tuple[StepPlan, list[list[int]]]] = []
    shared = [draw.randrange(7) for _ in range(12)]
    for turn in range(2000):
        if turn < 150 and draw.random() < 0.5:
            prompt = [*shared[: draw.choice((0, 8, 12))], *(draw.randrange(7) for _ in range(draw.randrange(1, 20)))]
            new = sequences_of(turn, prompt, n=draw.choice((1, 1, 3)), max_tokens=draw.randrange(1, 30), stop_token_ids=[3])
            target.check(new[0].request)
            for seq in new:
                target.add(seq)
            known += new
        if turn < 150 and draw.random() < 0.05 and (names := target.request_ids()):
            wrong |= {seq.seq_id for seq in target.cancel(draw.choice(names))}
        plan = target.plan(float(turn))
        if plan.sequences:
            assert len({seq.row for seq in plan.sequences}) == len(plan)
            assert all(seq.rank == rank == seq.row // ROWS for rank, part in enumerate(plan.parts) for seq in part.sequences)
            assert all(part.num_tokens <= 16 and len(part) <= ROWS for part in plan.parts)
            in_flight.append((plan, [[_next(seq)] if samples else [] for seq, samples in zip(plan.sequences, plan.samples, strict=True)]))
        if in_flight and (len(in_flight) == 2 or not plan.sequences):
            oldest, ids = in_flight.pop(0)
            if draw.random() < 0.02:
                wrong |= {seq.seq_id for seq in target.fail(oldest)}
            else:
                target.commit(oldest, ids)
            target.pop_poisoned()
        if turn >= 150 and not target.has_work:
            break
    assert not target.has_work and not in_flight and known
    for seq in known:
        assert seq.status is Status.FINISHED
        if seq.seq_id not in wrong:
            tokens, reason = reference(seq)
            assert (seq.tokens[seq.num_prompt :], seq.finish_reason) == (tokens, reason)
    assert target.blocks.free == target.blocks.total and all(rank.kv_cache.num_reserved == 0 for rank in target.ranks)
    assert target.num_running == target.num_waiting == target.num_preempted == 0 and target.request_ids() == []


def _next(seq: Sequence) -> int:
    """The token that the sequence samples in a step that was just planned."""
    tokens = reference(seq)[0]
    index = seq.num_generated - 1  # the token of this step is pending already
    return tokens[index] if index < len(tokens) else 0
