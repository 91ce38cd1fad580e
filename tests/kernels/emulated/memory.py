"""A device's memory: tensors at addresses of their own, with nothing between them that may be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]
BEGIN, APART = 1 << 20, 1 << 12


class Memory:
    """Bytes from address `begin` on. Every access is inside something allocated, and aligned to its size."""

    def __init__(self, size: int, begin: int = 0, is_there: bool = True) -> None:
        self.begin = begin
        self.data: Bytes = np.full(size, 0xFF, np.uint8)  # NaN, or -1: what nobody wrote shows
        self.is_there = np.full(size, is_there)
        self.num_stores = 0

    def _places(self, addresses: Addresses, size: int) -> NDArray[np.int64]:
        assert not (addresses % size).any(), f"an access of {size} bytes is not aligned"
        places = (addresses - self.begin)[:, None] + np.arange(size)
        assert ((places >= 0) & (places < len(self.data))).all() and self.is_there[places].all(), (
            f"{size} bytes are read or written outside of all tensors, at {[hex(a) for a in addresses[:4]]}"
        )
        return places

    def load(self, addresses: Addresses, size: int) -> Bytes:
        """[threads, size]"""
        return self.data[self._places(addresses, size)]

    def store(self, addresses: Addresses, values: Bytes) -> None:
        self.data[self._places(addresses, values.shape[1])] = values
        self.num_stores += 1


def needless_turns(addresses: Addresses, size: int) -> int:
    """Of whole warps' accesses of `size` bytes a thread to shared memory: turns beyond those that 128 bytes a turn ask for.

    Lanes take part together as far as 128 bytes go. Two of their words in one of the 32 banks are two turns, unless they are the same.
    """
    lanes, words = min(32, 128 // size), max(size // 4, 1)
    asked = (addresses.reshape(-1, lanes, 1) // 4 + np.arange(words)).reshape(-1, lanes * words)
    asked.sort(axis=1)
    is_new = np.diff(asked, axis=1, prepend=-1) != 0
    counts = np.zeros((len(asked), 32), np.int64)
    np.add.at(counts, (np.arange(len(asked))[:, None], asked % 32), is_new)
    return int((counts.max(1) - 1).sum())


class Tensors:
    """A device's memory with copies of tensors in it."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in given}
        self._places, end = dict[int, int](), BEGIN + APART
        for key, storage in self._storages.items():
            self._places[key] = end
            end += -(-storage.nbytes() // 256) * 256 + APART
        self.memory = Memory(end - BEGIN, BEGIN, False)
        for key, storage in self._storages.items():
            self.memory.is_there[self._range(key)] = True
            self.memory.data[self._range(key)] = _bytes(storage)

    def address(self, tensor: torch.Tensor) -> int:
        start = tensor.untyped_storage().data_ptr()
        return self._places[start] + tensor.data_ptr() - start

    def give_back(self) -> None:
        """Write what the device did into the tensors."""
        for key, storage in self._storages.items():
            _bytes(storage)[:] = self.memory.data[self._range(key)]

    def _range(self, key: int) -> slice:
        start = self._places[key] - BEGIN
        return slice(start, start + self._storages[key].nbytes())


def _bytes(storage: Any) -> Bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload,no-any-return]
