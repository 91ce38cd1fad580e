"""The KV cache manager of simulations, which know the blocks that no other prompt has: these are not indexed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.request import Sequence

SCANNED = 256  # blocks, to find the next one that has an entry


class PartialIndexManager(KVCacheManager):
    """Indexes only the blocks in `Sequence.packed_blocks`, which are leading ones of a prompt.

    The other full blocks are allocated, cached and evicted as if they were indexed, but they have no entry and no event. No sequence may
    contain such a block of another one; then the allocation, the evictions and the reused blocks of all sequences are those of a
    KVCacheManager. Sequences are not preempted.
    """

    _num_without_entry = 0  # of the blocks that are evicted next, at least; only an eviction removes them from the cache

    def _packed_blocks(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The blocks that are indexed: perhaps fewer than `num_blocks`."""
        return seq.packed_blocks

    def evicts_entries(self, count: int) -> bool:
        count -= self.pool.num_empty
        if count > self._num_without_entry:
            assert self.index is not None
            blocks, node_of = self.pool.next_evicted(max(count, SCANNED)), self.index.node_of
            self._num_without_entry = next((i for i, block in enumerate(blocks) if node_of(block) is not None), len(blocks))
        return count > self._num_without_entry

    def _evict(self, blocks: Seq[int]) -> None:
        self._num_without_entry -= len(blocks)
        if self._num_without_entry < 0:
            self._num_without_entry = 0
            super()._evict(blocks)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        first = max(seq.num_hashed, len(seq.packed_blocks))
        if seq.num_hashed < len(seq.packed_blocks):
            super().register(seq, num_tokens)
        else:
            seq.num_hashed = num_tokens // self.tokens_per_block
        self.pool.mark_reusable(seq.blocks[first : seq.num_hashed])
