"""Collects the changes of the prefix index during a step. This is the only part of the events that the step loop pays for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from stoker.runtime.kv.prefix_index import PrefixNode


class BlockChanges(NamedTuple):
    """Blocks that entered the prefix index (`stored`) or left it. A node names its tokens and, through its parents, all before them."""

    nodes: list[PrefixNode]
    stored: bool


NO_CHANGES: Seq[BlockChanges] = ()


class BlockEventLog:
    """The changes since the last `pop`, in order."""

    def __init__(self) -> None:
        self._changes: list[BlockChanges] = []

    def __len__(self) -> int:
        return len(self._changes)

    def store(self, nodes: list[PrefixNode]) -> None:
        """Note that the blocks of `nodes`, at least one, can be reused from now on."""
        self._changes.append(BlockChanges(nodes, True))

    def remove(self, nodes: list[PrefixNode]) -> None:
        """Note that the blocks of `nodes`, at least one, were evicted or poisoned."""
        self._changes.append(BlockChanges(nodes, False))

    def pop(self) -> Seq[BlockChanges]:
        """Remove and return the changes."""
        if not self._changes:
            return NO_CHANGES
        changes, self._changes = self._changes, []
        return changes
