"""Collects the changes of the prefix index during a step. This is the only part of the events that the step loop pays for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from stoker.runtime.kv.prefix_index import PrefixNode


class BlockChange(NamedTuple):
    """A block that entered the prefix index (`stored`) or left it. The node names its tokens and, through its parents, all before them."""

    node: PrefixNode
    stored: bool


NO_CHANGES: Seq[BlockChange] = ()


class BlockEventLog:
    """The changes since the last `pop`, in order."""

    def __init__(self) -> None:
        self._changes: list[BlockChange] = []

    def __len__(self) -> int:
        return len(self._changes)

    def store(self, node: PrefixNode) -> None:
        """Note that the block of `node` can be reused from now on."""
        self._changes.append(BlockChange(node, True))

    def remove(self, node: PrefixNode) -> None:
        """Note that the block of `node` was evicted or poisoned."""
        self._changes.append(BlockChange(node, False))

    def pop(self) -> Seq[BlockChange]:
        """Remove and return the changes."""
        if not self._changes:
            return NO_CHANGES
        changes, self._changes = self._changes, []
        return changes
