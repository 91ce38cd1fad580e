"""Blocks of imported prompts: which are held, and until when."""

from __future__ import annotations

from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.transfer.held_prompts import HeldPrompts

TOKENS = list(range(17))


def test_the_cached_prefix_of_an_import_is_not_evicted() -> None:
    """Two of four blocks are cached, and all blocks that are free are needed before the other two have arrived."""
    kv_cache = KVCacheManager(8, 4, prefix_reuse=True)
    held = HeldPrompts(kv_cache)
    targets = held.allocate("first", "", TOKENS[:9], 1)
    assert targets is not None and held.hold("first", "", TOKENS[:9], targets) and held.release("first")
    assert kv_cache.pool.num_free == 8 and len(kv_cache.cached_prefix("", TOKENS)) == 2
    targets = held.allocate("second", "", TOKENS, 1)
    assert targets is not None and (len(targets.prefix), len(targets.blocks)) == (2, 2)
    others = [kv_cache.pool.allocate() for _ in range(kv_cache.pool.num_free)]
    assert len(others) == 4 and kv_cache.pool.allocate() < 0
    assert held.hold("second", "", TOKENS, targets) and held.release("second")
    assert kv_cache.cached_prefix("", TOKENS) == [*targets.prefix, *targets.blocks]
    assert kv_cache.pool.num_free == 4 and not len(held)


def test_without_enough_blocks_no_reference_remains() -> None:
    kv_cache = KVCacheManager(8, 4, prefix_reuse=True)
    held = HeldPrompts(kv_cache)
    targets = held.allocate("first", "", TOKENS[:9], 1)
    assert targets is not None and held.hold("first", "", TOKENS[:9], targets) and held.release("first")
    others = [kv_cache.pool.allocate() for _ in range(5)]
    assert held.allocate("second", "", TOKENS, 1) is None and not len(held)
    assert kv_cache.pool.num_free == 3
    kv_cache.release_blocks(others)
    targets = held.allocate("second", "", TOKENS, 1)
    assert targets is not None
    held.discard("second", targets)
    assert kv_cache.pool.num_free == 8 and sorted(kv_cache.pop_poisoned()) == sorted(targets.blocks)
