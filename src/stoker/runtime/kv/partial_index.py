"""The KV cache manager of simulations, which know the blocks that no other prompt has: these are not indexed."""

from __future__ import annotations

from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.request import Sequence


class PartialIndexManager(KVCacheManager):
    """Indexes only the blocks in `Sequence.packed_blocks`, which are leading ones of a prompt.

    The other full blocks are allocated, cached and evicted as if they were indexed, but they have no entry and no event. No sequence may
    contain such a block of another one; then the allocation, the evictions and the reused blocks of all sequences are those of a
    KVCacheManager. Sequences are not preempted.
    """

    def _packed_blocks(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The blocks that are indexed: perhaps fewer than `num_blocks`."""
        return seq.packed_blocks

    def register(self, seq: Sequence, num_tokens: int) -> None:
        first = max(seq.num_hashed, len(seq.packed_blocks))
        super().register(seq, num_tokens)
        self.pool.mark_reusable(seq.blocks[first : seq.num_hashed])
