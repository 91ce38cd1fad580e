"""The KV cache manager: allocates, grows, shares and releases the blocks of sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

from stoker.runtime.kv.block_pool import BlockPool
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.prefix_index import Key, PrefixIndex, PrefixNode, child_digest, pack, pack_blocks
from stoker.runtime.kv.snapshots import StateSnapshots
from stoker.runtime.kv.tiers import NO_TRANSFERS, BlockTransfer, HostTier, Tier, TierOccupancy
from stoker.runtime.request import PrefixRoot, Sequence


class Match:
    """The cached blocks that a waiting sequence can reuse, and the number of blocks that must be allocated for the rest."""

    __slots__ = (
        "blocks",
        "host_blocks",
        "num_blocks_later",
        "num_blocks_now",
        "num_free",
        "num_indexed",
        "prefix",
        "producer",
        "state_slot",
    )

    def __init__(self, prefix: PrefixNode | PrefixRoot) -> None:
        self.blocks: list[int] = []  # device blocks to share
        self.host_blocks: Seq[int] = ()  # blocks of the host tier to load, which follow `blocks`
        self.prefix = prefix  # entry of the last of `blocks`, or the root
        self.num_indexed = 0  # leading blocks of the sequence that are in the prefix index, with or without a snapshot
        self.state_slot = -1  # of the snapshot after `blocks`, whose recurrent states the sequence continues from; -1: none
        self.producer: Sequence | None = None  # a running sequence that computes the next block
        self.num_free = 0  # free blocks after `blocks` are shared
        self.num_blocks_now = 0  # blocks to allocate for the known tokens, including the targets of loads
        self.num_blocks_later = 0  # blocks to allocate after those, until the last token of the sequence

    @property
    def num_reused(self) -> int:
        """The number of reused blocks, whose tokens need not be computed."""
        return len(self.blocks) + len(self.host_blocks)


class KVCacheManager:
    """Manages `Sequence.blocks`, with a pool of `num_blocks` device blocks of `tokens_per_block` tokens and an optional host tier.

    A sequence holds blocks for all its known tokens from its admission on, and grows by one block when a decode needs it.
    `num_reserved` is the number of blocks by which the admitted sequences may still grow. Shared blocks are full and are never written
    again, so that no copy on write is needed.

    With a host tier, evicted contents are offered to it, and a prefix can continue there. `pending_transfers` collects the transfers for
    the next step plan; each is passed to `end_transfers` when the plan is committed or has failed. A loaded block enters the prefix index
    with the commit of the sequence's step, like a computed one. Until then the transfer holds a reference to it.

    `event_log` collects which blocks enter and leave the prefix index.

    For a model with recurrent states, a prefix can be reused only up to a block after which `snapshots` has the states. A prefill is
    divided at the positions in `Sequence.snapshot_at`, so that a step ends there and its states can be saved: after the last full block,
    and where the tokens of another sequence continue differently.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        prefix_reuse: bool,
        host_tier: HostTier | None = None,
        event_log: BlockEventLog | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.snapshots = snapshots if prefix_reuse else None
        self.tokens_per_block = tokens_per_block
        self.index = PrefixIndex(num_blocks) if prefix_reuse else None
        self.host_tier = host_tier if prefix_reuse else None
        self.event_log = event_log
        self.pool = BlockPool(num_blocks, self._evict if self.index is not None else None)
        self.num_reserved = 0
        self.pending_transfers: list[BlockTransfer] = []
        self._announced: dict[Key, Sequence] = {}
        self._poisoned_in_use: set[int] = set()
        self._poisoned_free: list[int] = []  # without references since the last call of pop_poisoned

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def occupancy(self, num_cells: int) -> list[TierOccupancy]:
        """What the blocks of each tier hold, in at most `num_cells` cells per tier."""
        tiers = [self.pool.occupancy(num_cells)]
        return tiers if self.host_tier is None else [*tiers, self.host_tier.occupancy(num_cells)]

    def match(self, seq: Sequence) -> Match:
        """Find the cached blocks that `seq` can reuse, and set its `snapshot_at`.

        At least one token remains to be computed, because its logits are needed.

        Sequences that request log-probabilities of their prompt reuse nothing: each of their positions must be computed.
        """
        match = Match(seq.prefix_root)
        if self.index is not None and seq.params.prompt_logprobs is None:
            self._walk(seq, match, self.index)
            if self.snapshots is not None:
                _cut_to_snapshot(match, self.snapshots)
        if self.snapshots is not None:
            size = self.tokens_per_block
            ends = {match.num_indexed * size, (len(seq.tokens) - 1) // size * size}
            seq.snapshot_at = sorted(end for end in ends if end > len(match.blocks) * size)
        match.num_free = self.pool.num_free
        if match.blocks:
            refs = self.pool.refs
            match.num_free -= [refs[block] for block in match.blocks].count(0)
        num_blocks = self.num_blocks_for(len(seq.tokens))
        match.num_blocks_now = num_blocks - len(match.blocks)
        match.num_blocks_later = self.num_blocks_for(seq.max_computed) - num_blocks
        return match

    def _walk(self, seq: Sequence, match: Match, index: PrefixIndex) -> None:
        """Fill `match` with cached blocks of the prefix index, then of the host tier, up to the first block that is not cached."""
        num_blocks = (len(seq.tokens) - 1) // self.tokens_per_block
        packed = self._packed_blocks(seq, num_blocks)[:num_blocks]
        nodes = index.find_chain(match.prefix, packed)
        if nodes:
            match.prefix, match.blocks = nodes[-1], [node.block for node in nodes]
        num_found = len(nodes)
        if num_found < len(packed):
            match.producer = self._announced.get((match.prefix, packed[num_found]))
            if match.producer is None and self.host_tier is not None:
                match.host_blocks = _walk_host(match.prefix, packed[num_found:], self.host_tier)

    def _packed_blocks(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The packed token ids of at least the first `num_blocks` full blocks of `seq`. The ids of its known tokens do not change."""
        if len(seq.packed_blocks) < num_blocks:
            size = self.tokens_per_block
            seq.packed_blocks += pack_blocks(seq.tokens[len(seq.packed_blocks) * size :], size)
        return seq.packed_blocks

    def num_common_blocks(self, seq: Sequence, producer: Sequence) -> int:
        """The number of leading blocks that `producer` computes and `seq` can share, because their tokens are equal."""
        size = self.tokens_per_block
        limit = min(len(seq.tokens) - 1, producer.num_prefill) // size
        chunks = (slice(i * size, (i + 1) * size) for i in range(limit))
        return next((i for i, chunk in enumerate(chunks) if seq.tokens[chunk] != producer.tokens[chunk]), limit)

    def admit(self, seq: Sequence, match: Match) -> None:
        """Assign the matched blocks to `seq`, and new ones for the rest of its tokens. The caller has checked that enough are free."""
        pool = self.pool
        pool.acquire_many(match.blocks)
        if match.host_blocks:
            self._begin_loads(match.host_blocks)
        seq.blocks = match.blocks + pool.allocate_many(match.num_blocks_now)
        seq.num_hashed = len(match.blocks)
        if match.host_blocks:
            self._plan_loads(match.host_blocks, seq.blocks[seq.num_hashed : match.num_reused])
        seq.num_computed = match.num_reused * self.tokens_per_block
        seq.num_prefill = len(seq.tokens)
        seq.prefix = match.prefix
        self.num_reserved += match.num_blocks_later
        if self.index is not None:
            self._announce_next_block(seq)

    def grow(self, seq: Sequence) -> bool:
        """Allocate one more block for `seq`. False if none is free."""
        block = self.pool.allocate()
        if block < 0:
            return False
        seq.blocks.append(block)
        self.num_reserved -= 1
        return True

    def grow_all(self, sequences: Seq[Sequence]) -> None:
        """`grow` of each of the sequences, for which blocks are free."""
        self.num_reserved -= len(sequences)
        for seq, block in zip(sequences, self.pool.allocate_many(len(sequences)), strict=True):
            seq.blocks.append(block)

    def evicts_entries(self, count: int) -> bool:
        """Whether to allocate `count` blocks evicts one that is in the prefix index. All cached blocks are."""
        return count > self.pool.num_empty

    def trim(self, seq: Sequence, num_tokens: int) -> bool:
        """Release the blocks of `seq` that its first `num_tokens` tokens do not need. False if there are none."""
        num_blocks = self.num_blocks_for(num_tokens)
        surplus = seq.blocks[num_blocks:]
        self.pool.release_many(reversed(surplus))
        del seq.blocks[num_blocks:]
        seq.num_tabled_blocks = min(seq.num_tabled_blocks, num_blocks)
        self.num_reserved += len(surplus)
        return bool(surplus)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Add the full blocks among the first `num_tokens` tokens of `seq` to the prefix index.

        The ids of these tokens must be known, and their steps committed.
        """
        if self.index is None:
            return
        first, last = seq.num_hashed, num_tokens // self.tokens_per_block
        packed = self._packed_blocks(seq, last)[first:last]
        seq.prefix, added = self.index.add_chain(seq.prefix, packed, seq.blocks[first : first + len(packed)])
        self.pool.mark_reusable([node.block for node in added])
        if added and self.event_log is not None:
            self.event_log.store(added)
        seq.num_hashed = last
        if seq.announced_key is not None:  # it is in its prefill and has not retired
            self._announce_next_block(seq)

    def retire(self, seq: Sequence) -> None:
        """Cancel the reservation of `seq`, which has ended or is preempted and does not grow any more."""
        self.num_reserved -= self.num_blocks_for(seq.max_computed) - len(seq.blocks)
        if seq.announced_key is not None:
            self._withdraw_announcement(seq)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of `seq`."""
        self.release_blocks(seq.blocks)
        seq.blocks = []

    def release_blocks(self, blocks: Seq[int]) -> None:
        """Release one reference to each of the blocks of a prefix, the last ones first, so that a prefix is evicted from its end."""
        self.pool.release_many(reversed(blocks))
        if self._poisoned_in_use:
            self._collect_poisoned(blocks)

    def cached_prefix(self, root: PrefixRoot, token_ids: Seq[int]) -> list[int]:
        """The leading full blocks of a prompt, without its last token, that the device holds."""
        if self.index is None:
            return []
        size = self.tokens_per_block
        chunks = (pack(token_ids[start : start + size]) for start in range(0, (len(token_ids) - 1) // size * size, size))
        return [node.block for node in self.index.find_chain(root, chunks)]

    def acquire_prefix(self, root: PrefixRoot, token_ids: Seq[int]) -> list[int]:
        """`cached_prefix`, with a reference to each block, so that none is evicted."""
        blocks = self.cached_prefix(root, token_ids)
        self.pool.acquire_many(blocks)
        return blocks

    def allocate_imported(self, count: int, num_spared: int) -> list[int] | None:
        """Blocks for contents that another engine has computed; None if fewer than `num_spared` would then be free for others."""
        if self.pool.num_free - self.num_reserved - num_spared < count:
            return None
        return self.pool.allocate_many(count)

    def adopt(self, root: PrefixRoot, token_ids: Seq[int], first: int, blocks: Seq[int]) -> list[int]:
        """Add imported blocks to the prefix index: those of a prompt from its block `first` on.

        Returns all blocks of the prompt, with a reference to each; that of `allocate_imported` is released.
        """
        assert self.index is not None
        size, prompt = self.tokens_per_block, list[int]()
        parent: PrefixNode | PrefixRoot = root
        for i in range(first + len(blocks)):
            key = (parent, pack(token_ids[i * size : (i + 1) * size]))
            entry = self.index.find(key) if i < first else self.index.add(key, blocks[i - first])
            if entry is None:  # a block before the imported ones was poisoned
                break
            if i >= first and entry.block == blocks[i - first]:
                self.pool.mark_reusable((entry.block,))
                if self.event_log is not None:
                    self.event_log.store([entry])
            self.pool.acquire(entry.block)
            prompt.append(entry.block)
            parent = entry
        self.release_blocks(blocks)
        return prompt

    def poison(self, blocks: list[int]) -> None:
        """Mark blocks in use that may contain NaN. No other sequence shares them, and `pop_poisoned` returns them once they are free."""
        self.forget(blocks)
        self._poisoned_in_use.update(blocks)

    def forget(self, blocks: Collection[int]) -> None:
        """Remove blocks from the prefix index, because their contents may be wrong. Sequences that share them retain them."""
        self._forget(blocks)
        for block in blocks:
            self.pool.unmark_reusable(block)

    def pop_poisoned(self) -> list[int]:
        """Poisoned blocks that have become free since the last call. They must be zeroed before the next step is launched."""
        freed, self._poisoned_free = self._poisoned_free, []
        return freed

    def _collect_poisoned(self, released: Seq[int]) -> None:
        """Move poisoned blocks that have no reference any more to the list for `pop_poisoned`."""
        freed = {block for block in released if not self.pool.refs[block]} & self._poisoned_in_use
        self._poisoned_in_use -= freed
        self._poisoned_free += freed

    # Snapshots of recurrent states.

    def request_snapshot(self, seq: Sequence, num_blocks: int) -> None:
        """Divide the prefill of `seq` after `num_blocks` blocks, if it is not computed that far, because another sequence shares them."""
        end = num_blocks * self.tokens_per_block
        if self.snapshots is not None and seq.num_computed < end < seq.num_prefill and end not in seq.snapshot_at:
            seq.snapshot_at = sorted([*seq.snapshot_at, end])

    def plan_save(self, seq: Sequence, end: int) -> int:
        """A reserved slot for the states of `seq` after `end` tokens, the end of a block; -1 if there is none.

        A sequence that decodes has one snapshot of its generated tokens, which the next one replaces.
        """
        assert self.snapshots is not None
        return self.snapshots.reserve(seq.decode_snapshot if end > seq.num_prefill else None)

    def end_save(self, seq: Sequence, end: int, slot: int, *, succeeded: bool) -> None:
        """Attach a reserved slot to the block of `seq` that ends after `end` tokens. The step was committed (`succeeded`) or has failed.

        The slot is freed if the block is not in the prefix index, because the sequence ended before the commit.
        """
        assert self.snapshots is not None and self.index is not None
        node = seq.prefix
        is_indexed = isinstance(node, PrefixNode) and self.index.node_of(node.block) is node
        if not succeeded or not is_indexed or seq.num_hashed * self.tokens_per_block != end:
            self.snapshots.cancel(slot)
            return
        self.snapshots.attach(node, slot)
        if end > seq.num_prefill:
            seq.decode_snapshot = node

    # Announcements of blocks that are being computed.

    def _announce_next_block(self, seq: Sequence) -> None:
        """Announce the block that `seq` adds to the index next, so that sequences with the same tokens wait instead of computing it."""
        if seq.announced_key is not None:
            self._withdraw_announcement(seq)
        num_blocks = seq.num_hashed + 1
        if num_blocks * self.tokens_per_block <= seq.num_prefill and len(packed := self._packed_blocks(seq, num_blocks)) >= num_blocks:
            seq.announced_key = (seq.prefix, packed[seq.num_hashed])
            self._announced.setdefault(seq.announced_key, seq)

    def _withdraw_announcement(self, seq: Sequence) -> None:
        """Remove the announcement of `seq`."""
        if self._announced.get(seq.announced_key) is seq:
            del self._announced[seq.announced_key]
        seq.announced_key = None

    # Transfers between tiers.

    def pop_transfers(self) -> Seq[BlockTransfer]:
        """Remove and return the transfers for the next step plan, in the order in which they must be performed."""
        if not self.pending_transfers:
            return NO_TRANSFERS
        transfers, self.pending_transfers = self.pending_transfers, []
        return transfers

    def end_transfers(self, transfers: Seq[BlockTransfer], *, succeeded: bool) -> None:
        """Release the blocks of transfers whose step plan was committed (`succeeded`) or has failed."""
        tier = self.host_tier
        assert tier is not None
        for transfer in transfers:
            if transfer.target is Tier.HOST:
                tier.end_store(transfer.target_block, succeeded=succeeded)
            else:
                tier.end_load(transfer.source_block)
                self.pool.release(transfer.target_block)
                if self._poisoned_in_use:
                    self._collect_poisoned([transfer.target_block])

    def _begin_loads(self, host_blocks: Seq[int]) -> None:
        """Protect the host blocks of planned loads. Called before device blocks are allocated, which may make the host tier evict."""
        assert self.host_tier is not None
        for block in host_blocks:
            self.host_tier.begin_load(block)

    def _plan_loads(self, host_blocks: Seq[int], targets: Seq[int]) -> None:
        """Add a transfer from each host block to the device block with the same index in `targets`."""
        for source, target in zip(host_blocks, targets, strict=True):
            self.pool.acquire(target)  # released by end_transfers
            self.pending_transfers.append(BlockTransfer(Tier.HOST, source, Tier.DEVICE, target))

    def _evict(self, blocks: Seq[int]) -> None:
        """Forget the contents of unreferenced blocks, and offer them to the host tier."""
        if self.host_tier is not None:
            self._store_on_host(blocks, self.host_tier)
        self._forget(blocks)

    def _store_on_host(self, blocks: Iterable[int], tier: HostTier) -> None:
        """Offer the contents of evicted blocks to the host tier."""
        assert self.index is not None
        for block in blocks:
            if (node := self.index.node_of(block)) is not None and (target := tier.begin_store(node.digest)) >= 0:
                self.pending_transfers.append(BlockTransfer(Tier.DEVICE, block, Tier.HOST, target))

    def _forget(self, blocks: Iterable[int]) -> None:
        """Remove those of the blocks that are in the prefix index from it."""
        if self.index is None or not (nodes := self.index.forget(blocks)):
            return
        if self.snapshots is not None:
            for node in nodes:
                self.snapshots.forget(node)
        if self.event_log is not None:
            self.event_log.remove(nodes)


def _walk_host(parent: PrefixNode | PrefixRoot | bytes, packed_blocks: Seq[bytes], tier: HostTier) -> list[int]:
    """The blocks of the host tier that hold `packed_blocks`, which follow `parent`."""
    blocks = []
    for packed in packed_blocks:
        parent = child_digest(parent, packed)
        if (block := tier.find(parent)) < 0:
            break
        blocks.append(block)
    return blocks


def _cut_to_snapshot(match: Match, snapshots: StateSnapshots) -> None:
    """Shorten `match` to the last block after which there is a snapshot of the recurrent states."""
    match.num_indexed = len(match.blocks)
    match.host_blocks = ()
    while isinstance(match.prefix, PrefixNode) and not snapshots.has(match.prefix):
        match.prefix = match.prefix.parent
        match.blocks.pop()
    if isinstance(match.prefix, PrefixNode):
        match.state_slot = snapshots.use(match.prefix)
