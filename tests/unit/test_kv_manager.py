"""The KV cache manager and the prefix index: which blocks are shared, and which are evicted first."""

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
def test_at_least_one_token_is_computed_if_all_are_cached(cache: KVCacheManager, length: int, shared: int) -> None:
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


def test_uncommitted_blocks_are_not_shared(cache: KVCacheManager) -> None:
    seq = sequence([1] * 12)
    cache.admit(seq, cache.match(seq))
    cache.register(seq, 5)
    match = cache.match(sequence([1] * 12))
    assert match.blocks == seq.blocks[:1]
    assert match.producer is seq, "the sequence computes the next block"
    cache.register(seq, 12)
    assert cache.match(sequence([1] * 13)).producer is None


def test_no_sequence_waits_for_one_that_has_retired(cache: KVCacheManager) -> None:
    seq = sequence([1] * 12)
    cache.admit(seq, cache.match(seq))
    cache.retire(seq)
    cache.register(seq, 4)  # of a step that was in flight
    assert cache.match(sequence([1] * 12)).producer is None


def test_common_blocks_are_counted_from_the_first_token(cache: KVCacheManager) -> None:
    producer = sequence([1] * 4 + [2] * 4 + [3] * 4)
    producer.num_prefill = 12
    assert cache.num_common_blocks(sequence([1] * 4 + [2] * 4 + [9] * 8), producer) == 2
    assert cache.num_common_blocks(sequence([1] * 4 + [2] * 4), producer) == 1
    assert cache.num_common_blocks(sequence([9] * 8), producer) == 0


def test_prompt_logprobs_share_nothing(cache: KVCacheManager) -> None:
    computed(cache, [1] * 9)
    assert cache.match(sequence([1] * 9, prompt_logprobs=0)).blocks == []


def test_cached_blocks_remain_after_their_sequence_and_are_evicted_from_the_end(cache: KVCacheManager) -> None:
    first = computed(cache, list(range(12)))
    blocks = list(first.blocks)
    leave(cache, first)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 3)
    allocated = [cache.pool.allocate() for _ in range(6)]  # five empty blocks and the oldest cached one
    assert allocated[-1] == blocks[-1]
    assert cache.match(sequence(list(range(12)))).blocks == blocks[:2]


def test_one_copy_of_equal_contents_is_cached(cache: KVCacheManager) -> None:
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


def test_without_prefix_reuse_nothing_is_cached() -> None:
    cache = KVCacheManager(8, SIZE, prefix_reuse=False)
    seq = computed(cache, [1] * 9)
    assert cache.match(sequence([1] * 9)).blocks == []
    leave(cache, seq)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 0)


def test_growth_is_reserved_until_it_happens_or_the_sequence_retires(cache: KVCacheManager) -> None:
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


def test_digests_depend_on_adapter_salt_and_all_tokens(cache: KVCacheManager) -> None:
    def digests(tokens: list[int], salt: str = "", adapter: int = -1) -> list[bytes]:
        request = TokenRequest(request_id="r", prompt_ids=tokens, params=SamplingParams(), cache_salt=salt, adapter=adapter)
        index, parent, found = PrefixIndex(8), Sequence(0, request, 0, 0.0).prefix_root, []
        for block in range(len(tokens) // SIZE):
            parent = index.add((parent, pack(tokens[block * SIZE : (block + 1) * SIZE])), block)
            found.append(parent.digest)
        return found

    prompt = [1] * SIZE + [2] * SIZE
    variants = [prompt, [9, *prompt[1:]], [*prompt[:-1], 9]]
    assert digests(prompt) == digests(prompt) and digests(prompt)[:1] == digests(prompt[:SIZE])
    last = {digests(tokens, salt, adapter)[-1] for tokens in variants for salt in ("", "a", "(0, '')") for adapter in (-1, 0, 1)}
    assert len(last) == len(variants) * 9


class Colliding(bytes):
    """Chunks with equal hashes."""

    def __hash__(self) -> int:
        return 1


def test_chunks_with_equal_hashes_are_distinguished() -> None:
    index = PrefixIndex(4)
    keys = [("", Colliding(pack([i] * 4))) for i in range(3)]
    entries = [index.add(key, block) for block, key in enumerate(keys)]
    assert [index.find(key) for key in keys] == entries
    assert index.find(("", Colliding(pack([7] * 4)))) is None


def test_children_of_an_evicted_parent_are_not_found() -> None:
    index = PrefixIndex(4)
    first, rest = pack([1] * 4), pack([2] * 4)
    parent = index.add(("", first), 0)
    index.add((parent, rest), 1)
    index.forget([0])
    again = index.add(("", first), 2)
    assert isinstance(again, PrefixNode) and index.find((again, rest)) is None
    index.forget([1])
    assert len(index) == 1


def test_poisoned_blocks_are_not_shared_and_are_returned_when_free() -> None:
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
