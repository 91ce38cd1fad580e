"""Prefix index and block cache: what is shared, what isn't, and what is evicted first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.base.types import SamplingParams
from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.kv.prefix_index import PrefixIndex, PrefixNode, pack
from stoker.runtime.request import Sequence, TokenRequest

SIZE = 4


def sequence(tokens: list[int], salt: str = "", max_tokens: int = 4, **params: object) -> Sequence:
    request = TokenRequest(request_id="r", prompt_ids=tokens, params=SamplingParams(max_tokens=max_tokens, **params), cache_salt=salt)
    seq = Sequence(0, request, 0, 0.0)
    seq.max_computed = len(tokens) + max_tokens - 1
    return seq


def computed(cache: KVCacheManager, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence whose prompt was computed and committed."""
    seq = sequence(tokens, salt)
    cache.admit(seq, cache.match(seq))
    cache.register(seq, len(tokens))
    return seq


def leave(cache: KVCacheManager, seq: Sequence) -> None:
    cache.retire(seq)
    cache.release(seq)


@pytest.fixture
def cache() -> Iterator[KVCacheManager]:
    cache = KVCacheManager(8, SIZE, prefix_reuse=True)
    yield cache
    assert cache.num_reserved == 0 or any(cache.pool.refs)


def test_only_full_blocks_are_shared(cache: KVCacheManager) -> None:
    first = computed(cache, list(range(10)))
    match = cache.match(sequence([*range(10), 99, 98]))
    assert match.blocks == first.blocks[:2]
    assert (match.num_blocks_now, match.num_blocks_later, match.num_free) == (1, 1, 5)


@pytest.mark.parametrize(("length", "shared"), [(7, 1), (8, 1), (9, 2)])
def test_a_whole_hit_leaves_a_token_to_compute(cache: KVCacheManager, length: int, shared: int) -> None:
    computed(cache, list(range(12)))
    seq = sequence(list(range(length)))
    cache.admit(seq, cache.match(seq))
    assert seq.num_computed == shared * SIZE < seq.num_prefill == length


def test_sharing_ends_at_the_first_difference(cache: KVCacheManager) -> None:
    first = computed(cache, [1] * 4 + [2] * 4 + [3] * 4)
    assert cache.match(sequence([1] * 4 + [9] * 4 + [3] * 4 + [0])).blocks == first.blocks[:1]
    assert cache.match(sequence([2] * 4 + [3] * 4 + [0])).blocks == []


def test_salts_do_not_share(cache: KVCacheManager) -> None:
    first = computed(cache, [1] * 9, salt="a")
    assert cache.match(sequence([1] * 9)).blocks == cache.match(sequence([1] * 9, salt="b")).blocks == []
    assert cache.match(sequence([1] * 9, salt="a")).blocks == first.blocks[:2]


def test_what_is_not_committed_is_not_shared(cache: KVCacheManager) -> None:
    seq = sequence([1] * 12)
    cache.admit(seq, cache.match(seq))
    cache.register(seq, 5)
    match = cache.match(sequence([1] * 12))
    assert match.blocks == seq.blocks[:1]
    assert match.producer is seq, "the next block is being computed by it"
    cache.register(seq, 12)
    assert cache.match(sequence([1] * 13)).producer is None


def test_no_one_waits_for_a_sequence_that_left(cache: KVCacheManager) -> None:
    seq = sequence([1] * 12)
    cache.admit(seq, cache.match(seq))
    cache.retire(seq)
    cache.register(seq, 4)  # a step that was in flight when it left
    assert cache.match(sequence([1] * 12)).producer is None


def test_common_blocks_are_counted_from_the_first_token(cache: KVCacheManager) -> None:
    leader = sequence([1] * 4 + [2] * 4 + [3] * 4)
    leader.num_prefill = 12
    assert cache.num_common_blocks(sequence([1] * 4 + [2] * 4 + [9] * 8), leader) == 2
    assert cache.num_common_blocks(sequence([1] * 4 + [2] * 4), leader) == 1
    assert cache.num_common_blocks(sequence([9] * 8), leader) == 0


def test_prompt_logprobs_share_nothing(cache: KVCacheManager) -> None:
    computed(cache, [1] * 9)
    assert cache.match(sequence([1] * 9, prompt_logprobs=0)).blocks == []


def test_cached_blocks_outlive_their_sequence_and_go_from_the_end(cache: KVCacheManager) -> None:
    first = computed(cache, list(range(12)))
    blocks = list(first.blocks)
    leave(cache, first)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 3)
    taken = [cache.pool.allocate() for _ in range(6)]  # five blank ones and the oldest cached one
    assert taken[-1] == blocks[-1]
    assert cache.match(sequence(list(range(12)))).blocks == blocks[:2]


def test_two_that_computed_the_same_keep_one_copy(cache: KVCacheManager) -> None:
    one, two = sequence([1] * 9), sequence([1] * 9)
    for seq in (one, two):
        cache.admit(seq, cache.match(seq))
    for seq in (one, two):
        cache.register(seq, 9)
    assert not set(one.blocks) & set(two.blocks) and one.prefix is two.prefix
    assert cache.match(sequence([1] * 9)).blocks == one.blocks[:2]
    leave(cache, one)
    leave(cache, two)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 2)


def test_without_reuse_nothing_is_kept() -> None:
    cache = KVCacheManager(8, SIZE, prefix_reuse=False)
    seq = computed(cache, [1] * 9)
    assert cache.match(sequence([1] * 9)).blocks == []
    leave(cache, seq)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 0)


def test_growth_is_reserved_until_it_happens_or_the_sequence_leaves(cache: KVCacheManager) -> None:
    seq = computed(cache, [1] * 4)
    assert cache.num_reserved == 1
    seq2 = sequence([2] * 4, max_tokens=10)
    cache.admit(seq2, cache.match(seq2))
    assert cache.num_reserved == 4
    assert cache.grow(seq) and cache.num_reserved == 3
    leave(cache, seq2)
    assert cache.num_reserved == 0
    while cache.pool.num_free:
        cache.pool.allocate()
    assert not cache.grow(seq)


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
    assert isinstance(again, PrefixNode) and index.find((again, rest)) is None
    index.forget(1)
    assert len(index) == 1


def test_distrusted_blocks_are_shared_with_nobody_and_told_once_free() -> None:
    cache = KVCacheManager(8, 4, prefix_reuse=True)
    first, twin = sequence([*range(9)]), sequence([*range(9)])
    cache.admit(first, cache.match(first))
    cache.register(first, 8)
    cache.admit(twin, cache.match(twin))
    shared, own = first.blocks[:2], first.blocks[2:]
    assert twin.blocks[:2] == shared
    cache.poison(first.blocks)
    assert cache.pop_poisoned() == [] and not cache.match(sequence([*range(9)])).blocks
    cache.release(first)
    assert cache.pop_poisoned() == own and cache.pop_poisoned() == []
    cache.release(twin)
    assert sorted(cache.pop_poisoned()) == sorted(shared)
    assert cache.pool.num_cached == 0 and cache.pool.num_free == 8
