"""The load of each replica, and the least loaded one of a set in a time that hardly depends on the number of replicas."""

from __future__ import annotations

from bisect import bisect_left, insort

_SMALL = 8  # up to this number of replicas, the loads are compared one by one


class LoadTable:
    """Loads are whole numbers of tokens. Sets of replicas are bit masks over their slots."""

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}  # slot → load
        self._masks: dict[int, int] = {}  # load → replicas with it
        self._distinct: list[int] = []  # the keys of _masks, ascending

    def get(self, slot: int) -> int:
        """The load of a replica; 0 if it was never set."""
        return self._loads.get(slot, 0)

    def set(self, slot: int, load: int) -> None:
        """Set the load of a replica."""
        former, masks = self._loads.get(slot), self._masks
        if former == load:
            return
        if former is not None:
            self._leave(slot, former)
        self._loads[slot] = load
        if load in masks:
            masks[load] |= 1 << slot
        else:
            insort(self._distinct, load)
            masks[load] = 1 << slot

    def remove(self, slot: int) -> None:
        """Forget a replica."""
        if (load := self._loads.pop(slot, None)) is not None:
            self._leave(slot, load)

    def least(self, mask: int) -> tuple[int, int]:
        """(the lowest load, the mask of the replicas that have it), of the replicas in `mask`. It is not 0, and all of them have a load."""
        if mask.bit_count() <= _SMALL:
            return self._least_one_by_one(mask)
        for load in self._distinct:
            if found := self._masks[load] & mask:
                return load, found
        raise ValueError("a replica of the mask has no load")

    def _least_one_by_one(self, mask: int) -> tuple[int, int]:
        """`least` by comparing all replicas of the mask."""
        lowest, found = -1, 0
        while mask:
            bit = mask & -mask
            mask ^= bit
            load = self._loads[bit.bit_length() - 1]
            if lowest < 0 or load < lowest:
                lowest, found = load, bit
            elif load == lowest:
                found |= bit
        return lowest, found

    def _leave(self, slot: int, load: int) -> None:
        """Remove a replica from the mask of its former load."""
        if mask := self._masks[load] & ~(1 << slot):
            self._masks[load] = mask
        else:
            del self._masks[load]
            del self._distinct[bisect_left(self._distinct, load)]
