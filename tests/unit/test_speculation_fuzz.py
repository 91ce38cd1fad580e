"""20,000 steps of a scheduler with draft tokens and a stub device: random requests, acceptance, cancellation and failures."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest

from stoker.base.draft_tree import DraftTree
from stoker.base.types import FinishReason, Guide, SamplingParams
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule import planner
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler

SIZE, NUM_BLOCKS, MAX_LEN, NUM_STEPS = 4, 22, 48, 2500
CASES = [(proposer, depth, adaptive) for proposer in ("ngram", "request", "drafter") for depth in (1, 2) for adaptive in (False, True)]
PERIOD = 16
TREE = DraftTree((0, 0, 1, 1, 2, 3, 5), (0, 1, 0, 1, 0, 0, 0))  # of the drafts of `drafter`


def token(seq: Sequence, position: int) -> int:
    """The token that the model generates at a position. Long stretches repeat, so that prompt lookup finds some of them."""
    period = 3 + seq.seq_id % 4
    return zlib.crc32(f"{seq.seq_id % 7}/{position % period}/{position // 17}".encode()) % 6


def random_request(rng: random.Random, number: int) -> TokenRequest:
    """A request with random features that the scheduler sees, and drafts of which most are wrong or displaced."""
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "n": rng.choice((1, 1, 1, 3))}
    if rng.random() < 0.3:
        params["min_tokens"] = rng.randrange(params["max_tokens"] + 1)
    if rng.random() < 0.2:
        params["guide"] = Guide("json")
    if rng.random() < 0.2:
        params["bad_words"] = ((1, 2),)
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 1
    return TokenRequest(
        request_id=str(number), prompt_ids=[rng.randrange(6) for _ in range(rng.randrange(1, 20))], params=SamplingParams(**params),
        end_ids=rng.choice(((), (), (5,), (2, 4))), timeout_s=rng.choice((None, None, 30.0)), max_drafts=rng.choice((None, None, 0, 2)),
        draft_ids=[rng.randrange(6) for _ in range(rng.choice((0, 0, 12)))], priority=rng.randrange(3),
    )  # fmt: skip


def answer(rng: random.Random, plan: StepPlan, p_nothing: float) -> list[list[int]]:
    """What each row yields: the drafts that the model generates, too, and the token after them; nothing with probability `p_nothing`."""
    yielded: list[list[int]] = []
    for seq, start, num_new, samples, drafts, parents in zip(
        plan.sequences, plan.starts, plan.num_new, plan.samples, plan.drafts, plan.parents, strict=True
    ):  # fmt: skip
        first, node = start + num_new - len(drafts), 0
        ids = [token(seq, first)] if samples and rng.random() >= p_nothing else []
        while ids and (node := next((i for i, p in enumerate(parents, 1) if p == node and drafts[i - 1] == ids[-1]), 0)):
            ids.append(token(seq, first + len(ids)))
        yielded.append(ids)
    return yielded


def random_tree(rng: random.Random, seq: Sequence) -> list[int]:
    """Drafts after the newest token of a sequence: siblings differ, and one of them often is what the model generates."""
    drafts: list[int] = []
    depths = [0, *TREE.depths]
    for i, parent in enumerate(TREE.parents):
        taken = [drafts[j] for j in range(i) if TREE.parents[j] == parent]
        right = token(seq, len(seq.tokens) + depths[i + 1] - 1)
        drafts.append(right if right not in taken and rng.random() < 0.6 else rng.choice([one for one in range(6) if one not in taken]))
    return drafts


class Cells:
    """What each slot of a KV cache contains: a hash of the tokens up to the one that was stored."""

    def __init__(self) -> None:
        self.cells = [0] * (NUM_BLOCKS * SIZE)
        self.num_moves = 0

    def run(self, plan: StepPlan, failed: set[int]) -> None:
        """Perform the moves of a plan, check the keys before each row, and store its tokens.

        `failed`: the sequences of a step before it that fails, whose keys may be missing.
        """
        for source, target in plan.moves:
            self.cells[target] = self.cells[source]
            self.num_moves += 1
        stored: list[tuple[int, int]] = []
        rows = zip(plan.sequences, plan.starts, plan.num_new, plan.drafts, plan.parents, strict=True)
        for seq, start, num_new, drafts, parents in rows:
            slots = [seq.blocks[at // SIZE] * SIZE + at % SIZE for at in range(start + num_new)]
            value = 0
            for at in range(start + num_new - len(drafts)):
                value = hash((value, seq.tokens[at] if at < len(seq.tokens) else token(seq, at)))
                if at < start:
                    assert seq.seq_id in failed or self.cells[slots[at]] == value, "the key of another token"
                else:
                    stored.append((slots[at], value))
            values = [value]
            for draft, parent, slot in zip(drafts, parents, slots[len(slots) - len(drafts) :], strict=True):
                values.append(hash((values[parent], draft)))
                stored.append((slot, values[-1]))
        for slot, value in stored:
            self.cells[slot] = value


def check(scheduler: Scheduler, known: dict[int, Sequence]) -> None:
    """The invariants between two steps."""
    pool, refs = scheduler.kv_cache.pool, [0] * NUM_BLOCKS
    for seq in known.values():
        for block in seq.blocks:
            refs[block] += 1
        if seq.status is Status.RUNNING:
            assert len(seq.blocks) * SIZE >= seq.num_computed and seq.num_computed <= seq.max_computed
            if not seq.num_in_flight and seq.num_computed >= seq.num_prefill:
                assert len(seq.blocks) <= -(-len(seq.tokens) // SIZE), "blocks of rejected drafts remain"
                assert seq.num_pending == 0
    assert refs == list(pool.refs) and pool.num_free == refs.count(0)


@pytest.mark.parametrize(("proposer", "depth", "adaptive"), CASES)
def test_random_requests(proposer: str, depth: int, adaptive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "TREE_PERIOD", PERIOD)
    rng = random.Random(f"{proposer}{depth}{adaptive}")
    most = len(TREE) if proposer == "drafter" else 5
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, max_batch_size=6, max_num_tokens=24, max_seq_len=MAX_LEN,
        policy="max_utilization", proposer=proposer, draft_tokens=most, adaptive_drafts=adaptive,
        tree=TREE if proposer == "drafter" else None,
    )  # fmt: skip
    cells = Cells()
    known: dict[int, Sequence] = {}
    flights: list[tuple[StepPlan, list[list[int]], bool]] = []
    num_steps, num_requests, now = 0, 0, 0.0
    while num_steps < NUM_STEPS:
        now += 0.1
        while scheduler.num_waiting < 4:
            request = random_request(rng, num_requests)
            num_requests += 1
            scheduler.check(request)
            for index in range(request.params.n):
                seq = Sequence(num_requests * 10 + index, request, index, now)
                known[seq.seq_id] = seq
                scheduler.add(seq)
        scheduler.expire(now)
        if rng.random() < 0.02:
            scheduler.cancel(rng.choice([seq.request_id for seq in known.values()]))
        plan = scheduler.plan(now)
        if plan.sequences:
            num_steps += 1
            assert plan.num_tokens == sum(plan.num_new) <= 24 and len(plan) <= 6
            assert all(not drafts or num_new == 1 + len(drafts) for drafts, num_new in zip(plan.drafts, plan.num_new, strict=True))
            for seq, start, drafts, parents in zip(plan.sequences, plan.starts, plan.drafts, plan.parents, strict=True):
                is_chain = list(parents) == list(range(len(drafts)))
                assert is_chain or start // PERIOD == (start + len(drafts)) // PERIOD, "a tree in two parts with different key means"
                assert len(drafts) <= (most if seq.request.max_drafts is None else seq.request.max_drafts)
            fails = rng.random() < 0.01
            if not fails or rng.random() < 0.5:
                cells.run(plan, {seq.seq_id for before, _, fails in flights if fails for seq in before.sequences})
            flights.append((plan, answer(rng, plan, 0.01 if depth == 1 else 0.0), fails))
        if flights and (len(flights) >= depth or not plan.sequences):
            oldest, ids, fails = flights.pop(0)
            if fails:
                scheduler.fail(oldest)
            else:
                scheduler.draft_length.record_step(oldest.num_tokens, 1.0 + 0.1 * oldest.num_tokens)
                scheduler.commit(oldest, ids)
                for seq in oldest.sequences:
                    if proposer == "drafter":
                        seq.proposal = random_tree(rng, seq)
        check(scheduler, known)
        for seq in [seq for seq in known.values() if seq.status is Status.FINISHED and not seq.num_in_flight]:
            generated = seq.tokens[seq.num_prompt :]
            assert generated == [token(seq, seq.num_prompt + i) for i in range(len(generated))]
            if seq.finish_reason is FinishReason.STOP:
                assert generated[-1] in seq.end_ids and len(generated) > seq.params.min_tokens
            if seq.finish_reason is FinishReason.LENGTH:
                assert len(generated) == seq.max_tokens
            del known[seq.seq_id]
    drafts = scheduler.draft_length
    assert (cells.num_moves > 30) is (proposer == "drafter")
    assert 0 < drafts.num_accepted < drafts.num_drafts and scheduler.num_preemptions > 0
