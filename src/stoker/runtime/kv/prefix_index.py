"""Which block holds the keys and values of which tokens, as a tree of full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq


class PrefixNode:
    """One full block: its token ids after those of `parent`, which is another PrefixNode or, for a first block, the cache salt."""

    __slots__ = ("block", "chunk", "parent")

    def __init__(self, parent: PrefixNode | str, chunk: bytes, block: int) -> None:
        self.parent = parent
        self.chunk = chunk
        self.block = block


Key = tuple[PrefixNode | str, bytes]


def pack(token_ids: Seq[int]) -> bytes:
    """Token ids as bytes, four each: a twelfth of the memory of the integers, and quick to hash."""
    return array("i", token_ids).tobytes()


class PrefixIndex:
    """(parent, token ids) → block, for full blocks only.

    The parent stands for everything before it by identity, and token ids are compared as a whole, so two different prefixes
    are never taken for one another, whatever their hashes. An entry whose parent was evicted can't be found any more; its
    block is evicted in its turn.
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries: dict[Key, PrefixNode] = {}
        self._by_block: list[PrefixNode | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> PrefixNode | None:
        return self._entries.get(key)

    def add(self, key: Key, block: int) -> PrefixNode:
        """The entry for `key`: a new one that names `block`, or the one there is, which names another block of equal contents."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._by_block[block] = PrefixNode(*key, block)
        return entry

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        entry = self._by_block[block]
        if entry is not None:
            self._by_block[block] = None
            del self._entries[entry.parent, entry.chunk]
