"""Prefix index and block tables: what is shared, what isn't, and what is evicted first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.base.types import SamplingParams
from stoker.runtime.kv.prefix import Prefix, PrefixIndex, pack
from stoker.runtime.kv.tables import BlockTables
from stoker.runtime.request import Sequence, TokenRequest

SIZE = 4


def sequence(tokens: list[int], salt: str = "", max_tokens: int = 4, **params: object) -> Sequence:
    request = TokenRequest(request_id="r", prompt_ids=tokens, params=SamplingParams(max_tokens=max_tokens, **params), cache_salt=salt)
    seq = Sequence(0, request, 0, 0.0)
    seq.max_computed = len(tokens) + max_tokens - 1
    return seq


def computed(tables: BlockTables, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence whose prompt was computed and committed."""
    seq = sequence(tokens, salt)
    tables.admit(seq, tables.match(seq))
    tables.register(seq, len(tokens))
    return seq


def leave(tables: BlockTables, seq: Sequence) -> None:
    tables.retire(seq)
    tables.release(seq)


@pytest.fixture
def tables() -> Iterator[BlockTables]:
    tables = BlockTables(8, SIZE, prefix_reuse=True)
    yield tables
    assert tables.num_reserved == 0 or any(tables.pool.refs)


def test_only_full_blocks_are_shared(tables: BlockTables) -> None:
    first = computed(tables, list(range(10)))
    match = tables.match(sequence([*range(10), 99, 98]))
    assert match.blocks == first.blocks[:2]
    assert (match.num_blocks_now, match.num_blocks_later, match.num_free) == (1, 1, 5)


@pytest.mark.parametrize(("length", "shared"), [(7, 1), (8, 1), (9, 2)])
def test_a_whole_hit_leaves_a_token_to_compute(tables: BlockTables, length: int, shared: int) -> None:
    computed(tables, list(range(12)))
    seq = sequence(list(range(length)))
    tables.admit(seq, tables.match(seq))
    assert seq.num_computed == shared * SIZE < seq.num_prefill == length


def test_sharing_ends_at_the_first_difference(tables: BlockTables) -> None:
    first = computed(tables, [1] * 4 + [2] * 4 + [3] * 4)
    assert tables.match(sequence([1] * 4 + [9] * 4 + [3] * 4 + [0])).blocks == first.blocks[:1]
    assert tables.match(sequence([2] * 4 + [3] * 4 + [0])).blocks == []


def test_salts_do_not_share(tables: BlockTables) -> None:
    first = computed(tables, [1] * 9, salt="a")
    assert tables.match(sequence([1] * 9)).blocks == tables.match(sequence([1] * 9, salt="b")).blocks == []
    assert tables.match(sequence([1] * 9, salt="a")).blocks == first.blocks[:2]


def test_what_is_not_committed_is_not_shared(tables: BlockTables) -> None:
    seq = sequence([1] * 12)
    tables.admit(seq, tables.match(seq))
    tables.register(seq, 5)
    match = tables.match(sequence([1] * 12))
    assert match.blocks == seq.blocks[:1]
    assert match.leader is seq, "the next block is being computed by it"
    tables.register(seq, 12)
    assert tables.match(sequence([1] * 13)).leader is None


def test_no_one_waits_for_a_sequence_that_left(tables: BlockTables) -> None:
    seq = sequence([1] * 12)
    tables.admit(seq, tables.match(seq))
    tables.retire(seq)
    tables.register(seq, 4)  # a step that was in flight when it left
    assert tables.match(sequence([1] * 12)).leader is None


def test_common_blocks_are_counted_from_the_first_token(tables: BlockTables) -> None:
    leader = sequence([1] * 4 + [2] * 4 + [3] * 4)
    leader.num_prefill = 12
    assert tables.num_common_blocks(sequence([1] * 4 + [2] * 4 + [9] * 8), leader) == 2
    assert tables.num_common_blocks(sequence([1] * 4 + [2] * 4), leader) == 1
    assert tables.num_common_blocks(sequence([9] * 8), leader) == 0


def test_prompt_logprobs_share_nothing(tables: BlockTables) -> None:
    computed(tables, [1] * 9)
    assert tables.match(sequence([1] * 9, prompt_logprobs=0)).blocks == []


def test_cached_blocks_outlive_their_sequence_and_go_from_the_end(tables: BlockTables) -> None:
    first = computed(tables, list(range(12)))
    blocks = list(first.blocks)
    leave(tables, first)
    assert (tables.pool.num_free, tables.pool.num_cached) == (8, 3)
    taken = [tables.pool.allocate() for _ in range(6)]  # five blank ones and the oldest cached one
    assert taken[-1] == blocks[-1]
    assert tables.match(sequence(list(range(12)))).blocks == blocks[:2]


def test_two_that_computed_the_same_keep_one_copy(tables: BlockTables) -> None:
    one, two = sequence([1] * 9), sequence([1] * 9)
    for seq in (one, two):
        tables.admit(seq, tables.match(seq))
    for seq in (one, two):
        tables.register(seq, 9)
    assert not set(one.blocks) & set(two.blocks) and one.prefix is two.prefix
    assert tables.match(sequence([1] * 9)).blocks == one.blocks[:2]
    leave(tables, one)
    leave(tables, two)
    assert (tables.pool.num_free, tables.pool.num_cached) == (8, 2)


def test_without_reuse_nothing_is_kept() -> None:
    tables = BlockTables(8, SIZE, prefix_reuse=False)
    seq = computed(tables, [1] * 9)
    assert tables.match(sequence([1] * 9)).blocks == []
    leave(tables, seq)
    assert (tables.pool.num_free, tables.pool.num_cached) == (8, 0)


def test_growth_is_reserved_until_it_happens_or_the_sequence_leaves(tables: BlockTables) -> None:
    seq = computed(tables, [1] * 4)
    assert tables.num_reserved == 1
    seq2 = sequence([2] * 4, max_tokens=10)
    tables.admit(seq2, tables.match(seq2))
    assert tables.num_reserved == 4
    assert tables.grow(seq) and tables.num_reserved == 3
    leave(tables, seq2)
    assert tables.num_reserved == 0
    while tables.pool.num_free:
        tables.pool.allocate()
    assert not tables.grow(seq)


class Colliding(bytes):
    """Chunks that all hash alike."""

    def __hash__(self) -> int:
        return 1


def test_equal_hashes_are_told_apart() -> None:
    index = PrefixIndex(4)
    keys = [("", Colliding(pack([i] * 4))) for i in range(3)]
    entries = [index.add(key, block) for block, key in enumerate(keys)]
    assert [index.find(key) for key in keys] == entries
    assert index.find(("", Colliding(pack([7] * 4)))) is None


def test_an_evicted_parent_does_not_vouch_for_its_children() -> None:
    index = PrefixIndex(4)
    first, rest = pack([1] * 4), pack([2] * 4)
    parent = index.add(("", first), 0)
    index.add((parent, rest), 1)
    index.forget(0)
    again = index.add(("", first), 2)
    assert isinstance(again, Prefix) and index.find((again, rest)) is None
    index.forget(1)
    assert len(index) == 1


def test_distrusted_blocks_are_shared_with_nobody_and_told_once_free() -> None:
    tables = BlockTables(8, 4, prefix_reuse=True)
    first, twin = sequence([*range(9)]), sequence([*range(9)])
    tables.admit(first, tables.match(first))
    tables.register(first, 8)
    tables.admit(twin, tables.match(twin))
    shared, own = first.blocks[:2], first.blocks[2:]
    assert twin.blocks[:2] == shared
    tables.distrust(first.blocks)
    assert tables.take_distrusted() == [] and not tables.match(sequence([*range(9)])).blocks
    tables.release(first)
    assert tables.take_distrusted() == own and tables.take_distrusted() == []
    tables.release(twin)
    assert sorted(tables.take_distrusted()) == sorted(shared)
    assert tables.pool.num_cached == 0 and tables.pool.num_free == 8
