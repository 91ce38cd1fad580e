"""Which replicas hold which blocks. A set of replicas is a bit mask: bit i is the replica with slot i."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import msgspec

from stoker.router.core.prefix import PromptPrefix


class BlockIndex:
    """The blocks that replicas have reported: block hash → mask of replicas. Updates are idempotent."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._blocks: dict[int, set[int]] = {}  # slot → hashes

    def num_blocks(self, slot: int) -> int:
        """The number of blocks that the replica holds."""
        return len(self._blocks.get(slot, ()))

    def store(self, slot: int, hashes: Iterable[int]) -> None:
        """The replica holds these blocks from now on."""
        masks, bit, blocks = self.masks, 1 << slot, self._blocks.setdefault(slot, set())
        for value in hashes:
            masks[value] = masks.get(value, 0) | bit
            blocks.add(value)

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """The replica does not hold these blocks any more. Unknown blocks are ignored."""
        blocks = self._blocks.get(slot, set())
        for value in hashes:
            if value in blocks:
                blocks.remove(value)
                self._clear_bit(value, slot)

    def clear(self, slot: int) -> None:
        """The replica holds no blocks any more."""
        for value in self._blocks.pop(slot, ()):
            self._clear_bit(value, slot)

    def _clear_bit(self, value: int, slot: int) -> None:
        """Remove the replica from the mask of a block that it holds."""
        if mask := self.masks[value] & ~(1 << slot):
            self.masks[value] = mask
        else:
            del self.masks[value]


class PredictedIndex:
    """The blocks that replicas probably hold, because prompts with them were sent there: block hash → mask of replicas.

    An entry is forgotten `ttl_s` seconds after its last prompt, or when more than `max_blocks` blocks are known.
    """

    def __init__(self, ttl_s: float, max_blocks: int) -> None:
        self.masks: dict[int, int] = {}
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._times: OrderedDict[int, float] = OrderedDict()  # oldest first

    def store(self, slot: int, hashes: Iterable[int], now_s: float) -> None:
        """A prompt with these blocks was sent to the replica at `now_s` (monotonic)."""
        masks, times, bit = self.masks, self._times, 1 << slot
        for value in hashes:
            masks[value] = masks.get(value, 0) | bit
            times[value] = now_s
            times.move_to_end(value)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Forget old blocks, and those beyond the limit."""
        times = self._times
        while times:
            oldest = next(iter(times))
            if times[oldest] > now_s - self._ttl_s and len(times) <= self._max_blocks:
                return
            del times[oldest], self.masks[oldest]

    def clear(self, slot: int) -> None:
        """Forget the replica."""
        for value, mask in list(self.masks.items()):
            if mask >> slot & 1:
                if remaining := mask & ~(1 << slot):
                    self.masks[value] = remaining
                else:
                    del self.masks[value], self._times[value]


NOTHING: dict[int, int] = {}


class Level(msgspec.Struct, frozen=True):
    """The replicas that hold exactly the first `num_blocks` blocks of a prompt."""

    mask: int
    num_blocks: int


def match_levels(prefix: PromptPrefix, indexes: Seq[dict[int, int]], replicas: int) -> list[Level]:
    """Partition the mask `replicas` by the number of leading blocks that each holds, in ascending order.

    A block counts if any of `indexes` (masks by block hash) has it.
    """
    levels: list[Level] = []
    num_blocks = 0
    first, *others = [index for index in indexes if index] or [NOTHING]
    for value in prefix.hashes:
        holders = first.get(value, 0)
        for index in others:
            holders |= index.get(value, 0)
        remaining = replicas & holders
        if remaining != replicas:
            levels.append(Level(replicas & ~holders, num_blocks))
            if not remaining:
                return levels
            replicas = remaining
        num_blocks += 1
    levels.append(Level(replicas, num_blocks))
    return levels
