"""Imported prompts whose sequences wait: their blocks are held, because the least recently released ones are those of the next sequence.

Blocks are allocated only if the sequences can also grow to their ends, so that the first waiting one can always be admitted. Only a
sequence without an import, which waits before them, may need blocks that they hold; `release_all` resolves that.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.request import PrefixRoot


class ImportTargets(NamedTuple):
    """Blocks for a prompt: those at its begin that are cached, which are held, and those for its other contents."""

    prefix: list[int]
    blocks: list[int]


class HeldPrompts:
    """The held prompts of one executor, by any key. A key is used again only after its prompt was discarded or released."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._held: dict[Hashable, list[int]] = {}
        self._growth: dict[Hashable, int] = {}  # blocks that a sequence may need in addition; from the allocation of its targets on

    def __contains__(self, key: Hashable) -> bool:
        return key in self._growth

    def __len__(self) -> int:
        return len(self._growth)

    def allocate(self, key: Hashable, root: PrefixRoot, token_ids: Seq[int], max_tokens: int) -> ImportTargets | None:
        """Blocks for the part of a prompt that is not cached; None if running or held sequences may need them."""
        kv_cache = self._kv_cache
        num_blocks = (len(token_ids) - 1) // kv_cache.tokens_per_block
        growth = min(kv_cache.num_blocks_for(len(token_ids) + max_tokens - 1), kv_cache.pool.num_blocks) - num_blocks
        prefix = kv_cache.acquire_prefix(root, token_ids)
        blocks = kv_cache.allocate_imported(num_blocks - len(prefix), sum(self._growth.values()) + growth)
        if blocks is None:
            kv_cache.release_blocks(prefix)
            return None
        self._growth[key] = growth
        return ImportTargets(prefix, blocks)

    def discard(self, key: Hashable, targets: ImportTargets) -> None:
        """The contents of the targets are not valid. They are zeroed before they are used."""
        del self._growth[key]
        self._kv_cache.poison(targets.blocks)
        self._kv_cache.release_blocks([*targets.prefix, *targets.blocks])

    def abandon(self, key: Hashable, targets: ImportTargets) -> None:
        """The targets may be written at any time: their references are not released, so that no one else uses them."""
        del self._growth[key]
        self._kv_cache.release_blocks(targets.prefix)

    def reclaim(self, targets: ImportTargets) -> None:
        """Abandoned targets are not written any more. They are zeroed before they are used."""
        self._kv_cache.poison(targets.blocks)
        self._kv_cache.release_blocks(targets.blocks)

    def hold(self, key: Hashable, root: PrefixRoot, token_ids: Seq[int], targets: ImportTargets) -> bool:
        """The targets have their contents: add them to the prefix index, and hold all blocks of the prompt.

        False if a block before them has left the index, because it may contain NaN. Then only the blocks before that one are held.
        """
        held = self._held[key] = self._kv_cache.adopt(root, token_ids, len(targets.prefix), targets.blocks)
        self._kv_cache.release_blocks(targets.prefix)
        return len(held) == len(targets.prefix) + len(targets.blocks)

    def release(self, key: Hashable) -> bool:
        """The sequence was admitted or has ended. False if its prompt was not held."""
        if (blocks := self._held.pop(key, None)) is None:
            return False
        del self._growth[key]
        self._kv_cache.release_blocks(blocks)
        return True

    def release_all(self) -> None:
        """Release all held prompts. They remain cached until their blocks are needed."""
        for key in list(self._held):
            self.release(key)
