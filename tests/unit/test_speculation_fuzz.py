"""30,000 steps of a scheduler with draft tokens and a stub device: random requests, acceptance, cancellation and failures."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import pytest

from stoker.base.draft_tree import DraftTree
from stoker.base.types import FinishReason, Guide, SamplingParams
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule import planner
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler

SIZE, NUM_BLOCKS, MAX_LEN, NUM_STEPS = 4, 22, 48, 1900
CASES = [
    (proposer, depth, adaptive, ahead)
    for proposer in ("ngram", "request", "drafter")
    for depth, ahead in ((1, False), (2, False), (2, True))
    for adaptive in (False, True)
    if not ahead or proposer != "request"
]
PERIOD = 16
TREE = DraftTree((0, 0, 1, 1, 2, 3, 5), (0, 1, 0, 1, 0, 0, 0))  # of the drafts of `drafter`


def token(seq: Sequence, position: int) -> int:
    """The token that the model generates at a position. Long stretches repeat, so that prompt lookup finds some of them."""
    period = 3 + seq.seq_id % 4
    return zlib.crc32(f"{seq.seq_id % 7}/{position % period}/{position // 17}".encode()) % 6


def random_request(rng: random.Random, number: int, p_plain: float) -> TokenRequest:
    """A request with random features that the scheduler sees, and drafts of which most are wrong or displaced.

    With probability `p_plain` it has no feature that reads tokens on the host.
    """
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "n": rng.choice((1, 1, 1, 3))}
    if rng.random() < 0.3:
        params["min_tokens"] = rng.randrange(params["max_tokens"] + 1)
    if rng.random() < 0.2:
        params["guide"] = Guide("json")
    if rng.random() < 0.2:
        params["bad_words"] = ((1, 2),)
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 1
    is_plain = rng.random() < p_plain
    if is_plain:
        params = {name: value for name, value in params.items() if name not in ("min_tokens", "guide", "bad_words")}
    return TokenRequest(
        request_id=str(number), prompt_ids=[rng.randrange(6) for _ in range(rng.randrange(1, 20))], params=SamplingParams(**params),
        end_ids=rng.choice(((), (), (5,), (2, 4))), timeout_s=rng.choice((None, None, 30.0)), max_drafts=rng.choice((None, None, 0, 2)),
        draft_ids=[rng.randrange(6) for _ in range(0 if is_plain else rng.choice((0, 0, 12)))], priority=rng.randrange(3),
    )  # fmt: skip


class Row(NamedTuple):
    """A row as the device computes it: from its true position on, with the ids of all drafts."""

    seq: Sequence
    start: int
    num_new: int
    samples: bool
    drafts: Seq[int]
    parents: Seq[int]


class Flight(NamedTuple):
    """A step in flight: the plan, its rows, what each of them yields, and whether the step fails."""

    plan: StepPlan
    rows: list[Row]
    yielded: list[list[int]]
    fails: bool


def rows_of(rng: random.Random, plan: StepPlan, flights: list[Flight]) -> list[Row]:
    """The rows of a plan. The device knows how many drafts the steps in flight reject, and proposes the drafts that the host left open."""
    late: dict[int, int] = {}
    for flight in flights:
        for row, ids in zip(flight.rows, flight.yielded, strict=True):
            late[row.seq.seq_id] = late.get(row.seq.seq_id, 0) + (1 + len(row.drafts) - len(ids) if row.samples else 0)
    rows: list[Row] = []
    for seq, start, num_new, samples, drafts, parents in zip(
        plan.sequences, plan.starts, plan.num_new, plan.samples, plan.drafts, plan.parents, strict=True
    ):  # fmt: skip
        assert len(seq.blocks) * SIZE >= start + num_new, "no block is reserved for the longest advance"
        begin = start - late.get(seq.seq_id, 0)
        if -1 in drafts:
            assert seq.drafts_ahead and set(drafts) == {-1} and seq.num_in_flight > 1
            after = begin + num_new - len(drafts)
            drafts = [token(seq, after + i) if rng.random() < 0.8 else rng.randrange(6) for i in range(len(drafts))]
        rows.append(Row(seq, begin, num_new, samples, drafts, parents))
    return rows


def answer(rng: random.Random, rows: list[Row], p_nothing: float) -> list[list[int]]:
    """What each row yields: the drafts that the model generates, too, and the token after them; nothing with probability `p_nothing`."""
    yielded: list[list[int]] = []
    for seq, start, num_new, samples, drafts, parents in rows:
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

    def run(self, plan: StepPlan, rows: list[Row], failed: set[int]) -> None:
        """Perform the moves of a plan, check the keys before each row, and store its tokens.

        `failed`: the sequences of a step before it that fails, whose keys may be missing.
        """
        for source, target in plan.moves:
            self.cells[target] = self.cells[source]
            self.num_moves += 1
        stored: list[tuple[int, int]] = []
        for seq, start, num_new, _, drafts, parents in rows:
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


@pytest.mark.parametrize(("proposer", "depth", "adaptive", "ahead"), CASES)
def test_random_requests(proposer: str, depth: int, adaptive: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ahead`: steps with drafts are planned before the ids of earlier steps are known, if all running sequences allow it."""
    monkeypatch.setattr(planner, "TREE_PERIOD", PERIOD)
    rng = random.Random(f"{proposer}{depth}{adaptive}{ahead}")
    tree = TREE if proposer == "drafter" and not ahead else None
    most = len(tree) if tree is not None else 5
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, max_batch_size=6, max_num_tokens=24, max_seq_len=MAX_LEN,
        policy="max_utilization", proposer=proposer, draft_tokens=most, adaptive_drafts=adaptive,
        tree=tree, drafter_catches_up=ahead and adaptive and proposer == "drafter",
    )  # fmt: skip
    cells = Cells()
    known: dict[int, Sequence] = {}
    flights: list[Flight] = []
    num_steps, num_requests, num_ahead, now = 0, 0, 0, 0.0
    while num_steps < NUM_STEPS:
        now += 0.1
        while scheduler.num_waiting < 4:
            request = random_request(rng, num_requests, 0.97 if ahead else 0.0)
            num_requests += 1
            scheduler.check(request)
            for index in range(request.params.n):
                seq = Sequence(num_requests * 10 + index, request, index, now)
                seq.drafts_ahead = ahead and not (seq.reads_drafts or seq.min_tokens or request.draft_ids)
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
            rows = rows_of(rng, plan, flights)
            if not fails or rng.random() < 0.5:
                cells.run(plan, rows, {seq.seq_id for flight in flights if flight.fails for seq in flight.plan.sequences})
            flights.append(Flight(plan, rows, answer(rng, rows, 0.01 if depth == 1 else 0.0), fails))
            num_ahead += sum(-1 in drafts for drafts in plan.drafts)
        if flights and (len(flights) >= depth or not plan.sequences):
            oldest, _, ids, fails = flights.pop(0)
            if fails:
                scheduler.fail(oldest)
            else:
                scheduler.draft_length.record_step(oldest.num_tokens, 1.0 + 0.1 * oldest.num_tokens)
                scheduler.commit(oldest, ids)
                for seq in oldest.sequences:
                    if tree is not None:
                        seq.proposal = random_tree(rng, seq)
                    elif proposer == "drafter":
                        seq.proposal = [token(seq, len(seq.tokens) + i) for i in range(rng.randrange(6))]
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
    assert (cells.num_moves > 30) is (tree is not None) and (num_ahead > 300) is ahead
    assert 0 < drafts.num_accepted < drafts.num_drafts and scheduler.num_preemptions > 0
