"""The block pool compared with a model, including the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.base.errors import ConfigError
from stoker.runtime.kv.block_pool import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """The model: reference counts, the reusable blocks, and the list of cached blocks, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, self.evicted.extend)
        self.refs = [0] * NUM_BLOCKS
        self.reusable: set[int] = set()
        self.oldest: list[int] = []

    @rule()
    def allocate(self) -> None:
        empty = [b for b in range(NUM_BLOCKS) if not self.refs[b] and b not in self.reusable]
        self.evicted.clear()
        block = self.pool.allocate()
        if empty:
            assert block in empty and not self.evicted
        elif self.oldest:
            assert block == self.oldest.pop(0) and self.evicted == [block]
            self.reusable.remove(block)
        else:
            assert block == -1
            return
        self.refs[block] = 1

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate_many(self, count: int) -> None:
        """The blocks, and their order, are those of single allocations."""
        count = min(count, self.refs.count(0))
        empty, single, evicted = (
            self.pool._empty,
            self.pool._empty[-1 : -1 - count : -1],
            self.oldest[: max(0, count - self.pool.num_empty)],
        )
        self.evicted.clear()
        blocks = self.pool.allocate_many(count)
        assert blocks == single + evicted and self.evicted == evicted and self.pool._empty is empty
        del self.oldest[: len(evicted)]
        self.reusable -= set(evicted)
        for block in blocks:
            self.refs[block] = 1

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def mark_reusable(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in range(NUM_BLOCKS) if self.refs[b]]))
        self.pool.mark_reusable([block])
        self.reusable.add(block)

    @precondition(lambda self: any(self.refs) or self.oldest)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in range(NUM_BLOCKS) if self.refs[b] or b in self.reusable]))
        self.pool.acquire(block)
        if not self.refs[block]:
            self.oldest.remove(block)
        self.refs[block] += 1

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in range(NUM_BLOCKS) if self.refs[b]]))
        self.pool.release(block)
        self.refs[block] -= 1
        if not self.refs[block] and block in self.reusable:
            self.oldest.append(block)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.refs == self.refs
        assert self.pool.num_free == self.refs.count(0)
        assert self.pool.num_cached == len(self.oldest)


PoolMachine.TestCase.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_releasing_a_block_too_often_raises() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RuntimeError, match="more often than"):
        pool.release(block)


def test_a_cache_without_blocks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        BlockPool(0)
