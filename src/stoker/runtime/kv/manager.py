"""Block tables: how a sequence gets, grows, shares and gives back its blocks."""

from __future__ import annotations

from stoker.runtime.kv.block_pool import BlockPool
from stoker.runtime.kv.prefix_index import Key, PrefixIndex, PrefixNode, pack
from stoker.runtime.request import Sequence


class Match:
    """What the prefix index holds of a waiting sequence's tokens."""

    __slots__ = ("blocks", "leader", "num_blocks_later", "num_blocks_now", "num_free", "prefix")

    def __init__(self, prefix: PrefixNode | str) -> None:
        self.blocks: list[int] = []  # blocks to share
        self.prefix = prefix  # entry of the last of them, or the salt
        self.leader: Sequence | None = None  # a running sequence that is computing the block that comes next
        self.num_free = 0  # free blocks once `blocks` are shared
        self.num_blocks_now = 0  # blocks to allocate for the tokens that exist
        self.num_blocks_later = 0  # blocks to allocate after those, until the sequence's last token


class KVCacheManager:
    """Fills and empties `Sequence.blocks` from a pool of `num_blocks` blocks of `tokens_per_block` tokens.

    A sequence holds the blocks of all its known tokens from its admission on, and grows by a block when a decode needs one.
    `num_reserved` is the number of blocks by which the admitted sequences may still grow. Shared blocks are full and are
    never written again, so they need no copy on write.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, *, prefix_reuse: bool) -> None:
        self.tokens_per_block = tokens_per_block
        self.index = PrefixIndex(num_blocks) if prefix_reuse else None
        self.pool = BlockPool(num_blocks, self.index.forget if self.index is not None else None)
        self.num_reserved = 0
        self._fronts: dict[Key, Sequence] = {}
        self._poisoned_in_use: set[int] = set()  # in use
        self._poisoned_free: list[int] = []  # were distrusted, and nobody refers to them any more

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def match(self, seq: Sequence) -> Match:
        """What `seq` could share now. At least one of its tokens is left to compute, for there must be logits to sample from.

        Sequences that want log-probabilities of their prompt share nothing: each of its positions must be computed.
        """
        match = Match(seq.request.cache_salt)
        if self.index is not None and seq.params.prompt_logprobs is None:
            self._walk(seq, match, self.index)
        refs = self.pool.refs
        match.num_free = self.pool.num_free - sum(not refs[block] for block in match.blocks)
        num_blocks = self.num_blocks_for(len(seq.tokens))
        match.num_blocks_now = num_blocks - len(match.blocks)
        match.num_blocks_later = self.num_blocks_for(seq.max_computed) - num_blocks
        return match

    def _walk(self, seq: Sequence, match: Match, index: PrefixIndex) -> None:
        size = self.tokens_per_block
        for start in range(0, (len(seq.tokens) - 1) // size * size, size):
            key = (match.prefix, pack(seq.tokens[start : start + size]))
            entry = index.find(key)
            if entry is None:
                match.leader = self._fronts.get(key)
                return
            match.prefix = entry
            match.blocks.append(entry.block)

    def num_common_blocks(self, seq: Sequence, leader: Sequence) -> int:
        """How many of the blocks that `leader` computes `seq` can share, from the first token on."""
        size = self.tokens_per_block
        limit = min(len(seq.tokens) - 1, leader.num_prefill) // size
        chunks = (slice(i * size, (i + 1) * size) for i in range(limit))
        return next((i for i, chunk in enumerate(chunks) if seq.tokens[chunk] != leader.tokens[chunk]), limit)

    def admit(self, seq: Sequence, match: Match) -> None:
        """Give `seq` the matched blocks and new ones for the rest of its tokens; the caller saw to it that they are free."""
        pool = self.pool
        for block in match.blocks:
            pool.share(block)
        seq.blocks = match.blocks + [pool.allocate() for _ in range(match.num_blocks_now)]
        seq.num_hashed = len(match.blocks)
        seq.num_computed = seq.num_hashed * self.tokens_per_block
        seq.num_prefill = len(seq.tokens)
        seq.prefix = match.prefix
        self.num_reserved += match.num_blocks_later
        if self.index is not None:
            self._advance_front(seq)

    def grow(self, seq: Sequence) -> bool:
        """One block more; False when none is free."""
        block = self.pool.allocate()
        if block < 0:
            return False
        seq.blocks.append(block)
        self.num_reserved -= 1
        return True

    def trim(self, seq: Sequence, num_tokens: int) -> bool:
        """Release the blocks after those of the first `num_tokens` tokens; False when there are none."""
        num_blocks = self.num_blocks_for(num_tokens)
        surplus = seq.blocks[num_blocks:]
        for block in reversed(surplus):
            self.pool.release(block)
        del seq.blocks[num_blocks:]
        self.num_reserved += len(surplus)
        return bool(surplus)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Index the blocks among the first `num_tokens` tokens, which are computed, committed and known."""
        if self.index is None:
            return
        size = self.tokens_per_block
        last = num_tokens // size
        chunks = pack(seq.tokens[seq.num_hashed * size : last * size])
        for i in range(last - seq.num_hashed):
            block = seq.blocks[seq.num_hashed + i]
            seq.prefix = self.index.add((seq.prefix, chunks[i * size * 4 : (i + 1) * size * 4]), block)
            if seq.prefix.block == block:
                self.pool.keep(block)
        seq.num_hashed = last
        if seq.front is not None:  # it is in its prefill, and hasn't retired
            self._advance_front(seq)

    def retire(self, seq: Sequence) -> None:
        """`seq` won't grow any more: it ended, or is preempted."""
        self.num_reserved -= self.num_blocks_for(seq.max_computed) - len(seq.blocks)
        self._drop_front(seq)

    def release(self, seq: Sequence) -> None:
        """Take all blocks from `seq`. Its last ones become the oldest, so a prefix is evicted from its end."""
        release = self.pool.release
        for block in reversed(seq.blocks):
            release(block)
        if self._poisoned_in_use:
            freed = {block for block in seq.blocks if not self.pool.refs[block]} & self._poisoned_in_use
            self._poisoned_in_use -= freed
            self._poisoned_free += freed
        seq.blocks = []

    def poison(self, blocks: list[int]) -> None:
        """These blocks in use may hold what is not numbers: no later sequence shares them, and they are to be zeroed."""
        for block in blocks:
            if self.index is not None:
                self.index.forget(block)
            self.pool.discard(block)
            self._poisoned_in_use.add(block)

    def take_poisoned(self) -> list[int]:
        """Distrusted blocks that those who referred to them have given up, each once. Zero them before the next step is launched."""
        freed, self._poisoned_free = self._poisoned_free, []
        return freed

    def _advance_front(self, seq: Sequence) -> None:
        """Announce the block that `seq` will add to the index next, so that others wait for it instead of computing it too."""
        self._drop_front(seq)
        start = seq.num_hashed * self.tokens_per_block
        if start + self.tokens_per_block <= seq.num_prefill:
            seq.front = (seq.prefix, pack(seq.tokens[start : start + self.tokens_per_block]))
            self._fronts.setdefault(seq.front, seq)

    def _drop_front(self, seq: Sequence) -> None:
        if seq.front is not None and self._fronts.get(seq.front) is seq:
            del self._fronts[seq.front]
        seq.front = None
