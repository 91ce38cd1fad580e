"""Prompt lookup and the number of drafts, without a model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stoker.base.config import LOOKUP_SIZES
from stoker.base.draft_tree import node_depths
from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.draft_length import DraftLength
from stoker.runtime.schedule.node_acceptance import NodeAcceptance
from stoker.runtime.schedule.proposers.ngram import MAX_PROMPT, NgramProposer
from stoker.runtime.schedule.proposers.supplied import SuppliedDrafts
from stoker.runtime.schedule.proposers.token_index import TokenIndex


def sequence(prompt: list[int], draft_ids: list[int] | None = None, **params: Any) -> Sequence:
    request = TokenRequest(request_id="r", prompt_ids=prompt, params=SamplingParams(**params), draft_ids=draft_ids or [])
    return Sequence(0, request, 0, 0.0)


def last_occurrence(text: list[int], newest: list[int], size: int) -> int:
    """The position after the last occurrence of the newest `size` tokens that another token follows; -1: none."""
    wanted = newest[-size:]
    found = [end for end in range(size, len(text)) if text[end - size : end] == wanted]
    return found[-1] if len(wanted) == size and found else -1


def test_the_index_finds_the_last_occurrence_of_the_longest_run() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(rng.randrange(40))]
        index, length = TokenIndex(), 0
        while length < len(text):  # grows in chunks
            count = rng.randrange(1, 9)
            index.append(text[length : length + count])
            length += count
        index.follow((), text)
        position = next((at for size in LOOKUP_SIZES if (at := last_occurrence(text, text, size)) >= 0), -1)
        found = index.continuation(4)
        assert found == (text[position : position + len(found)] if position >= 0 else []) and bool(found) == (position >= 0)


def test_a_copied_passage_is_followed_where_its_words_occur_several_times() -> None:
    passage = [1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 9, 7, 1, 2, 3, 8]
    proposer, seq = NgramProposer(), sequence([*passage, 50])
    seq.tokens += passage[:2]
    proposed = 0
    while len(seq.tokens) < 17 + len(passage):
        drafts = proposer.propose(seq, 3)
        rest = passage[len(seq.tokens) - 17 :]
        accepted = next((i for i, token in enumerate(drafts) if token != rest[i : i + 1][0]), len(drafts)) if rest else 0
        proposed += accepted
        seq.tokens += rest[: accepted + 1]
    assert proposed >= 9


def test_a_trusted_passage_continues_at_the_first_token_that_agrees_again() -> None:
    passage = list(range(20, 40))
    for replaced, new in ((1, [7]), (3, [8]), (0, [7, 8, 9])):  # tokens replaced by others, and tokens inserted
        proposer, seq = NgramProposer(), sequence([*passage, 50])
        seq.tokens += passage[:6]
        assert proposer.propose(seq, 2) == passage[6:8]
        seq.tokens += passage[6:7]
        assert proposer.propose(seq, 2) == passage[7:9]
        seq.tokens += new
        assert not proposer.propose(seq, 2)
        seq.tokens += passage[7 + replaced : 8 + replaced]
        assert proposer.propose(seq, 4) == passage[8 + replaced : 10 + replaced]
    for count, agreeing in (
        (2, 3),
        (6, 7),
        (7, 18),
    ):  # a passage that is not trusted, or not copied since then, and a token beyond the window
        proposer, seq = NgramProposer(), sequence([*passage, 50])
        seq.tokens += passage[: min(count, 6)]
        assert proposer.propose(seq, 1)
        seq.tokens += passage[6:count]
        assert proposer.propose(seq, 1) == passage[count : count + 1]
        seq.tokens += [7, passage[agreeing]]
        assert not proposer.propose(seq, 2)


def test_repetitions_are_continued_beyond_the_end_of_the_text() -> None:
    seq = sequence([5, 6, 7, 5, 6, 7, 5, 6])
    assert list(NgramProposer().propose(seq, 8)) == [7, 5, 6, 7, 5, 6, 7, 5]


def test_a_long_prompt_is_indexed_from_its_end() -> None:
    seq = sequence([1, 2, 3, 4, 5, 6] + [9] * MAX_PROMPT + [1, 2, 3, 4, 5])
    assert not NgramProposer().propose(seq, 4)


def test_supplied_drafts_continue_after_a_difference() -> None:
    proposer, seq = SuppliedDrafts(), sequence([1, 2], draft_ids=list(range(10, 30)))
    assert proposer.waits(seq) and list(proposer.propose(seq, 3)) == [10, 11, 12]
    seq.tokens += [10, 11, 99]
    assert not proposer.waits(seq)
    seq.tokens += [14, 15, 16]
    assert list(proposer.propose(seq, 4)) == [17, 18, 19, 20]
    assert not SuppliedDrafts().waits(sequence([14, 15, 16]))


@pytest.mark.parametrize(
    ("base", "slope", "rows", "acceptance", "least", "most"),
    [
        (100.0, 1.0, 1, 0.8, 5, 8), (100.0, 1.0, 1, 0.02, 0, 1), (2.0, 1.0, 1, 0.9, 1, 5), (100.0, 1.0, 200, 0.6, 0, 0),
        (0.0, 1.0, 1, 0.5, 0, 0), (100.0, 0.0, 8, 0.9, 8, 8),
    ],
)  # fmt: skip
def test_the_number_of_drafts_is_the_one_with_the_largest_rate(
    base: float, slope: float, rows: int, acceptance: float, least: int, most: int
) -> None:
    """Times and acceptance are simulated; the best number is known from the formula."""
    length, rng, seq = DraftLength(8, is_adaptive=True), random.Random(1), sequence([1])
    counts = []
    for _ in range(400):
        count = length.limit(seq, rows)
        counts.append(count)
        length.record_step(rows * (1 + count), (base + slope * rows * (1 + count)) * rng.uniform(0.95, 1.05))
        length.record_step(rows, (base + slope * rows) * rng.uniform(0.95, 1.05))
        accepted = 0
        while accepted < count and rng.random() < acceptance:
            accepted += 1
        if count:
            length.record(seq, count, range(1, accepted + 1))
        seq.tokens += [0] * (1 + accepted)
    late = sorted(counts[200:])
    assert least <= late[len(late) // 2] <= most
    if most == 0:
        assert sum(late) <= 30, "attempts become rare"


@pytest.mark.parametrize(("base", "rows", "least", "most"), [(100.0, 1, 6, 9), (100.0, 400, 0, 0), (12.0, 2, 1, 4)])
def test_the_number_of_nodes_of_a_tree(base: float, rows: int, least: int, most: int) -> None:
    """Node i follows the newest token or node 1, and is accepted with a known probability; the last seven nodes are useless."""
    parents, probabilities = (0, 1, 0, 1, 0, 2, 0, 1, 0, 0, 0, 1, 2), (0.5, 0.6, 0.2, 0.2, 0.1, 0.5)
    length, rng, seq = (
        DraftLength(13, is_adaptive=True, nodes=NodeAcceptance(len(parents), max(node_depths(parents)))),
        random.Random(1),
        sequence([1]),
    )
    counts = []
    for _ in range(600):
        count = length.limit(seq, rows)
        counts.append(count)
        length.record_step(rows * (1 + count), (base + rows * (1 + count)) * rng.uniform(0.95, 1.05))
        length.record_step(rows, (base + rows) * rng.uniform(0.95, 1.05))
        path, node = list[int](), 0
        while children := [i for i, parent in enumerate(parents[:count], 1) if parent == node and i <= len(probabilities)]:
            weights = [probabilities[i - 1] for i in children]
            (node,) = rng.choices([*children, 0], [*weights, max(1 - sum(weights), 0)])
            if not node:
                break
            path.append(node)
        if count:
            length.record(seq, count, path)
        seq.tokens += [0] * (1 + len(path))
    late = sorted(counts[300:])
    assert least <= late[len(late) // 2] <= most
    assert length.nodes is not None and (rows > 1 or length.nodes.rates[0] > 0.3 > 0.1 > max(length.nodes.rates[6:9]))


def test_a_sequence_that_begins_to_copy_gets_drafts_again() -> None:
    length, seq = DraftLength(8, is_adaptive=True), sequence([1])
    for step in range(2000):
        count = length.limit(seq, 1)
        length.record_step(1 + count, 10.0 + count)
        if count:
            length.record(seq, count, range(1, count + 1) if step >= 1000 else ())
        seq.tokens.append(0)
    assert length.limit(seq, 1) == 8 and seq.acceptance.num_drafts < 60 + 8 * 1000


def test_without_adaptation_the_number_is_constant() -> None:
    length, seq = DraftLength(5, is_adaptive=False), sequence([1])
    for _ in range(50):
        assert length.limit(seq, 100) == 5
        length.record(seq, 5, ())
    assert (seq.acceptance.num_drafts, seq.acceptance.num_accepted) == (250, 0)


def test_a_drafter_rarely_runs_at_full_load() -> None:
    """64 rows whose drafts are accepted do not pay where each token costs the same; their attempts do not add up."""
    length = DraftLength(4, is_adaptive=True, draft_share=0.12, limits_attempts=True)
    rows, num_drafter_steps = [sequence([1]) for _ in range(64)], 0
    for step in range(1000):
        limits = [length.limit(seq, 64) for seq in rows]
        num_drafter_steps += any(limits)
        assert sum(limits) <= 1
        for num_tokens in (64 + sum(limits), 60):  # the number of rows varies a little
            length.record_step(num_tokens, 1.0 + num_tokens)
        for i, seq in enumerate(rows):
            if limits[i] and step % 2:  # the draft is computed in one step, and verified in the next one
                length.record(seq, 1, (1,))
            seq.tokens += [0] * (1 + limits[i])
        rows = [sequence([1]) if len(seq.tokens) > 200 else seq for seq in rows]
    assert 0 < num_drafter_steps <= 2 * (2000 // 64 + 1)


def test_the_time_of_a_drafter_counts() -> None:
    """On an idle device, drafts from the host are free until they cost verification; those of a draft engine cost a share of a step."""
    counts = {}
    for share in (0.0, 0.1, 0.5, 1.0):
        length = DraftLength(8, is_adaptive=True, draft_share=share, limits_attempts=share > 0)
        for _ in range(20):
            length.record_step(1, 101.0)
            length.record_step(5, 105.0)
        counts[share] = length.limit(sequence([1]), 1)  # 70 % are accepted before any were measured
    assert counts[0.0] > counts[0.1] >= 2 and counts[0.5] <= 1 and counts[1.0] == 0
