"""The blocks of the KV cache: who refers to each, and which to take next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from stoker.base.errors import ConfigError


class BlockPool:
    """`num_blocks` blocks with reference counts. Every operation takes constant time.

    A block without references is free. Free blocks that hold nothing are taken first, then kept ones (their contents serve a
    prefix) from the least recently used on; taking a kept block forgets its contents, of which `on_evict` is told.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the KV cache has room for {num_blocks} blocks.", cure="Raise kv_cache_tokens or kv_cache_fraction.")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.on_evict = on_evict
        self._kept = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack; low ids first
        # Not a dict: finding a dict's first key steps over every deleted one before it.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, kept ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that are kept."""
        return len(self._cached)

    def allocate(self) -> int:
        """A free block, now with one reference; -1 when there is none."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block = self._evict()
        else:
            return -1
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is kept or in use."""
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1

    def keep(self, block: int) -> None:
        """The block's contents are worth keeping once nobody refers to it. It must be in use."""
        self._kept[block] = 1

    def discard(self, block: int) -> None:
        """The contents of a block in use are not worth keeping after all."""
        self._kept[block] = 0

    def release(self, block: int) -> None:
        """One reference less."""
        refs = self.refs[block] - 1
        if refs < 0:
            raise RuntimeError(f"block {block} is released once too often")
        self.refs[block] = refs
        if refs == 0:
            if self._kept[block]:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = 0
        if self.on_evict is not None:
            self.on_evict(block)
        return block
