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

import msgspec


class Tier(enum.IntEnum):
    DEVICE = 0
    HOST = 1


class BlockTransfer(NamedTuple):
    """A copy of the keys and values of all layers of one block."""

    source: Tier
    source_block: int
    target: Tier
    target_block: int


class TierOccupancy(msgspec.Struct):
    """How many blocks of one tier hold what, in cells of `blocks_per_cell` consecutive blocks; the last cell may have fewer."""

    name: str
    num_blocks: int
    blocks_per_cell: int
    used: list[int]  # blocks of each cell that sequences reference; of the host tier: that a transfer reads or writes
    shared: list[int]  # of those, blocks that several sequences reference
    cached: list[int]  # unreferenced blocks whose contents can be reused


NO_TRANSFERS: Seq[BlockTransfer] = ()


class HostTier(ABC):
    """The blocks in host memory. It manages which contents they hold, for the KV cache manager; it does not copy."""

    @abstractmethod
    def occupancy(self, num_cells: int) -> TierOccupancy:
        """What the blocks hold, in at most `num_cells` cells."""

    @abstractmethod
    def find(self, digest: bytes) -> int:
        """The block that holds the contents with this digest, or -1."""

    @abstractmethod
    def begin_load(self, block: int) -> None:
        """Called when a transfer from `block` is planned. Several may be planned at the same time."""

    @abstractmethod
    def end_load(self, block: int) -> None:
        """Called when a transfer from `block` was committed or has failed."""

    @abstractmethod
    def begin_store(self, digest: bytes) -> int:
        """A block for contents that are evicted from the device, or -1 to decline, for example because the tier holds them already."""

    @abstractmethod
    def end_store(self, block: int, *, succeeded: bool) -> None:
        """Called when the transfer to `block` was committed (`succeeded`) or has failed, after which its contents are undefined."""
