"""Device memory: tensors at separate addresses, with gaps between them that no kernel may access."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from emulated.ordering import History

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]
BEGIN, APART = 1 << 20, 1 << 12


class Memory:
    """Bytes from address `begin` on. Every access must be inside an allocation, and aligned to its size.

    history: the record of accesses, which detects races; assigned before a kernel runs.
    """

    history: History

    def __init__(self, size: int, begin: int = 0, is_allocated: bool = True) -> None:
        self.begin = begin
        self.data: Bytes = np.full(size, 0xFF, np.uint8)  # NaN, or -1, until it is stored
        self.is_allocated = np.full(size, is_allocated)
        self.num_stores = 0

    def _places(self, addresses: Addresses, size: int) -> NDArray[np.int64]:
        assert not (addresses % size).any(), f"an access of {size} bytes is not aligned"
        places = (addresses - self.begin)[:, None] + np.arange(size)
        assert ((places >= 0) & (places < len(self.data))).all() and self.is_allocated[places].all(), (
            f"{size} bytes are loaded or stored outside of all tensors, at {[hex(a) for a in addresses[:4]]}"
        )
        return places

    def load(self, addresses: Addresses, size: int) -> Bytes:
        """The bytes [accesses, size] at `addresses`. Raises AssertionError outside an allocation or without alignment."""
        return self.data[self._places(addresses, size)]

    def store(self, addresses: Addresses, values: Bytes) -> None:
        self.data[self._places(addresses, values.shape[1])] = values
        self.num_stores += 1


def bank_conflicts(addresses: Addresses, size: int) -> int:
    """The bank conflicts of accesses to shared memory by whole warps, `size` bytes per thread: the cycles beyond one per 128 bytes.

    Lanes access shared memory together in groups that cover 128 bytes. Two different words of a group in the same of the 32 banks take one
    cycle each.
    """
    if not len(addresses):
        return 0
    return _bank_conflicts((addresses - (addresses[0] & ~127)).tobytes(), size)


@lru_cache(1 << 14)
def _bank_conflicts(from_first: bytes, size: int) -> int:
    """`bank_conflicts` of addresses from which a multiple of 128 was subtracted, as bytes, so that results can be cached."""
    addresses, lanes, words = np.frombuffer(from_first, np.int64), min(32, 128 // size), max(size // 4, 1)
    accessed = (addresses.reshape(-1, lanes, 1) // 4 + np.arange(words)).reshape(-1, lanes * words)
    accessed.sort(axis=1)
    is_new = np.diff(accessed, axis=1, prepend=np.iinfo(np.int64).min) != 0
    counts = np.zeros((len(accessed), 32), np.int64)
    np.add.at(counts, (np.arange(len(accessed))[:, None], accessed % 32), is_new)
    return int((counts.max(1) - 1).sum())


class Tensors:
    """Device memory that holds copies of tensors. Tensors that share a storage share its copy."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._places, end = dict[int, int](), BEGIN + APART
        for key, storage in self._storages.items():
            self._places[key] = end
            end += -(-storage.nbytes() // 256) * 256 + APART
        self.memory = Memory(end - BEGIN, BEGIN, False)
        for key, storage in self._storages.items():
            self.memory.is_allocated[self._range(key)] = True
            self.memory.data[self._range(key)] = _bytes(storage)

    def address(self, tensor: torch.Tensor) -> int:
        start = tensor.untyped_storage().data_ptr()
        return self._places[start] + tensor.data_ptr() - start

    def places(self) -> Iterator[tuple[int, Any, slice]]:
        """For each storage: its address on the host as a key, the storage, and its slice of the memory's data."""
        return ((key, storage, self._range(key)) for key, storage in self._storages.items())

    def copy_back(self) -> None:
        """Copy the memory back into the tensors."""
        for key, storage in self._storages.items():
            _bytes(storage)[:] = self.memory.data[self._range(key)]

    def _range(self, key: int) -> slice:
        start = self._places[key] - BEGIN
        return slice(start, start + self._storages[key].nbytes())


def _bytes(storage: Any) -> Bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload,no-any-return]
