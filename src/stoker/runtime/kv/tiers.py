"""Tiers of the KV cache: the device, and a host tier that holds contents which were evicted from the device.

The scheduler decides about tiers; the worker copies. A step plan lists block transfers, and the worker performs them in order before it
computes the step. A device block may therefore be the source of a transfer and be written by the step of the same plan.

A host tier has three obligations:

- it identifies contents by `PrefixNode.digest`, which covers adapter, salt and all tokens up to the end of the block;
- `find` returns contents only after the transfer that stored them was committed;
- a block that is a source or target of an uncommitted transfer is neither evicted nor given to other contents.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple


class Tier(enum.IntEnum):
    DEVICE = 0
    HOST = 1


class BlockTransfer(NamedTuple):
    """A copy of the keys and values of all layers of one block."""

    source: Tier
    source_block: int
    target: Tier
    target_block: int


NO_TRANSFERS: Seq[BlockTransfer] = ()


class HostTier(ABC):
    """Blocks in host memory. Used by the KV cache manager; it only manages the contents of blocks, and does not copy."""

    @abstractmethod
    def find(self, digest: bytes) -> int:
        """Return the block that holds the contents, or -1."""

    @abstractmethod
    def begin_load(self, block: int) -> None:
        """`block` is the source of a planned transfer. Several may be planned at the same time."""

    @abstractmethod
    def end_load(self, block: int) -> None:
        """A transfer from `block` was committed, or failed."""

    @abstractmethod
    def begin_store(self, digest: bytes) -> int:
        """Return a block for contents that are evicted from the device, or -1 to decline, for example because it has them."""

    @abstractmethod
    def end_store(self, block: int, *, succeeded: bool) -> None:
        """The transfer to `block` was committed, or failed. After a failure the contents of the block are undefined."""
