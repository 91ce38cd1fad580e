"""Snapshots of recurrent states: copies of the states after a block of the prefix index, so that a prefix of such a model can be reused."""

from __future__ import annotations

from collections import OrderedDict

from stoker.runtime.kv.prefix_index import PrefixNode


class StateSnapshots:
    """`num_slots` slots from number `first_slot` on, each free, reserved by a planned step, or the snapshot of a block.

    A step saves the states of a row in a reserved slot, and its commit attaches the slot to the block that the row has completed. The
    snapshots that were used least recently are evicted. A slot can be reserved again while steps that read it are in flight, because
    steps copy states in the order in which they were planned.
    """

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(first_slot + num_slots - 1, first_slot - 1, -1))
        self._slots: OrderedDict[PrefixNode, int] = OrderedDict()  # the least recently used one first
        self._shared: set[PrefixNode] = set()  # those that a sequence has reused

    def __len__(self) -> int:
        """The number of snapshots."""
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """The number of slots that are neither snapshots nor reserved."""
        return len(self._free)

    def has(self, node: PrefixNode) -> bool:
        """Whether there is a snapshot of the states after this block."""
        return node in self._slots

    def use(self, node: PrefixNode) -> int:
        """The slot of the snapshot after this block, which becomes the most recently used one."""
        self._slots.move_to_end(node)
        self._shared.add(node)
        return self._slots[node]

    def reserve(self, replaced: PrefixNode | None = None) -> int:
        """A slot for a planned step, or -1 if all are reserved.

        It is that of `replaced`, an earlier snapshot of the same sequence, unless another sequence has reused it.
        """
        if replaced is not None and replaced in self._slots and replaced not in self._shared:
            return self._slots.pop(replaced)
        if self._free:
            return self._free.pop()
        if not self._slots:
            return -1
        node, slot = self._slots.popitem(last=False)
        self._shared.discard(node)
        return slot

    def attach(self, node: PrefixNode, slot: int) -> None:
        """Make a reserved slot the snapshot after this block, unless there is one."""
        if node in self._slots:
            self.cancel(slot)
        else:
            self._slots[node] = slot

    def cancel(self, slot: int) -> None:
        """Free a reserved slot, whose step failed or whose block is not in the prefix index."""
        self._free.append(slot)

    def forget(self, node: PrefixNode) -> None:
        """Free the snapshot after this block, if there is one: the block leaves the prefix index."""
        self._shared.discard(node)
        if (slot := self._slots.pop(node, None)) is not None:
            self._free.append(slot)
