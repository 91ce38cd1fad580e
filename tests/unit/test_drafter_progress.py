"""Random steps with a drafter that catches up: no row verifies drafts that were computed without all tokens before them."""

from __future__ import annotations

import random
import zlib

import pytest

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from unit.stub_device import link, root

SIZE, NUM_BLOCKS, MAX_TOKENS, NUM_STEPS = 4, 24, 16, 1500


def token(seq: Sequence, position: int) -> int:
    """The token that the model generates at a position; sequences with equal prompts share a part of the answers."""
    return zlib.crc32(f"{seq.seq_id % 2}/{position}".encode()) % 6


class StubDrafter:
    """The cache of a draft engine: for each slot, a function of its token and of all tokens before it."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.is_exact: dict[int, bool] = {}  # by seq_id: whether the newest drafts were computed from all tokens before them
        self.num_caught_up = self.num_runs = 0

    def run(self, plan: StepPlan) -> None:
        """Catch up, then compute the rows of the step; the drafts of a row that lacks tokens are not exact."""
        if plan.catch_up is not None:
            missing = plan.catch_up
            assert plan.num_wanted is not None and missing.num_tokens == sum(missing.num_new) <= MAX_TOKENS
            self.num_caught_up += missing.num_tokens
            for seq, start, count in zip(missing.sequences, missing.starts, missing.num_new, strict=True):
                assert self._row(seq, start, seq.tokens[start : start + count]), "the missing tokens do not follow those in the cache"
        if plan.num_wanted is None:
            for seq in plan.sequences:
                self.is_exact[seq.seq_id] = False
            return
        self.num_runs += 1
        for seq, start, num_new, drafts in zip(plan.sequences, plan.starts, plan.num_new, plan.drafts, strict=True):
            known = seq.tokens[start : start + num_new - len(drafts)] or [token(seq, start)]
            self.is_exact[seq.seq_id] = self._row(seq, start, [*known, *drafts])

    def _row(self, seq: Sequence, start: int, tokens: list[int]) -> bool:
        state, is_exact = root(seq.prefix_root), True
        for position, one in enumerate(seq.tokens[:start]):
            state = link(state, one)
            is_exact = is_exact and self.slots.get(self._slot(seq, position)) == state
        for position, one in enumerate(tokens, start):
            state = link(state, one)
            self.slots[self._slot(seq, position)] = state if is_exact else -1
        return is_exact

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.blocks[position // SIZE] * SIZE + position % SIZE


class RecurrentStubDrafter(StubDrafter):
    """The recurrent states of a draft engine: for each row, the number of tokens whose state it has, and a function of these tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, tuple[int, int]] = {}

    def _row(self, seq: Sequence, start: int, tokens: list[int]) -> bool:
        count, state = self.states.get(seq.row, (0, root(seq.prefix_root)))
        if start not in (0, count):
            return False
        right = root(seq.prefix_root)
        for one in [*seq.tokens[:start], *(token(seq, position) for position in range(len(seq.tokens), start))]:
            right = link(right, one)
        is_exact, position = start == 0 or state == right, start
        state = right if start == 0 else state
        for one in tokens:
            if position >= len(seq.tokens) and one != token(seq, position):
                break  # a rejected draft
            state, position = link(state, one), position + 1
        self.states[seq.row] = position, state
        return is_exact


def run_random_steps(depth: int, rng: random.Random, drafter: StubDrafter) -> Scheduler:
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, max_batch_size=5, max_num_tokens=MAX_TOKENS, max_seq_len=60,
        policy="max_utilization", proposer="drafter", draft_tokens=4, drafter_catches_up=True,
        drafter_has_state=isinstance(drafter, RecurrentStubDrafter),
    )  # fmt: skip
    # The number of drafts changes at random, also while steps are in flight.
    scheduler.draft_length.limit = lambda seq, num_rows: rng.choice((0, 0, 0, 0, 0, 2, 4))  # type: ignore[method-assign]
    known, flights = list[Sequence](), list[tuple[StepPlan, list[list[int]]]]()
    for number in range(NUM_STEPS):
        while scheduler.num_waiting < 2:
            prompt = [rng.randrange(3) for _ in range(2)] * rng.randrange(1, 10)
            request = TokenRequest(request_id=str(len(known)), prompt_ids=prompt, params=SamplingParams(max_tokens=rng.randrange(1, 24)))
            known.append(Sequence(len(known), request, 0, float(number)))
            scheduler.add(known[-1])
        plan = scheduler.plan(float(number))
        if plan.sequences:
            for seq, drafts in zip(plan.sequences, plan.drafts, strict=True):
                assert not drafts or drafter.is_exact[seq.seq_id], "drafts of a row that lacked tokens are verified"
            drafter.run(plan)
            flights.append((plan, answer(plan)))
        if flights and (len(flights) >= depth or not plan.sequences):
            oldest, ids = flights.pop(0)
            for seq, samples in zip(oldest.sequences, oldest.samples, strict=True):
                if samples:
                    seq.proposal = [rng.randrange(6) for _ in range(oldest.num_wanted or 0)]
            scheduler.commit(oldest, ids)
    for seq in known:
        generated = seq.tokens[seq.num_prompt :]
        assert generated == [token(seq, seq.num_prompt + i) for i in range(len(generated))]
    assert sum(seq.status is Status.FINISHED for seq in known) > 100
    return scheduler


def answer(plan: StepPlan) -> list[list[int]]:
    """What each row yields: the drafts that equal the tokens of the model, and the token after them."""
    yielded: list[list[int]] = []
    for seq, start, num_new, samples, drafts in zip(plan.sequences, plan.starts, plan.num_new, plan.samples, plan.drafts, strict=True):
        first = start + num_new - len(drafts)
        ids = [token(seq, first)] if samples else []
        while ids and len(ids) <= len(drafts) and drafts[len(ids) - 1] == ids[-1]:
            ids.append(token(seq, first + len(ids)))
        yielded.append(ids)
    return yielded


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", [StubDrafter, RecurrentStubDrafter])
def test_random_steps(depth: int, kind: type[StubDrafter]) -> None:
    drafter = kind()
    scheduler = run_random_steps(depth, random.Random(depth), drafter)
    assert scheduler.num_preemptions > 0 and scheduler.num_reused_tokens > 300
    assert drafter.num_caught_up > 500 and drafter.num_runs < 0.9 * NUM_STEPS
    assert scheduler.draft_length.num_drafts > 200
