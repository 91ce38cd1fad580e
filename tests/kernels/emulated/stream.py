"""Launches of one stream, of which each may begin before its predecessor has ended (programmatic dependent launch).

They run one after another here; what a launch must not touch yet is found by the numbers of the launches that stored and loaded each byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulated.ordering import Clock, History, RaceError

if TYPE_CHECKING:
    from emulated.memory import Bytes, Tensors

Launches = NDArray[np.int32]


class Pending:
    """The accesses of launches that may still run when a launch begins."""

    def __init__(self, stored: Launches, loaded: Launches, granule: int, finished: int, unfinished: range) -> None:
        self._stored, self._loaded = (each.reshape(-1, granule).max(1) for each in (stored, loaded))
        self._finished, self._unfinished = finished, unfinished

    def check(self, places: NDArray[np.int64], has_waited: NDArray[np.bool_], now: str) -> None:
        """places: of granules [accesses, granules]. has_waited: [accesses, 1], whether their threads have waited. Raises RaceError."""
        if has_waited.all() and not self._unfinished:
            return
        launch = self._stored[places]
        if now == "stored":
            launch = np.maximum(launch, self._loaded[places])
        early = ~has_waited & (launch > self._finished)
        if early.any():
            raise RaceError(f"global memory that launch {launch[early][0]} accesses is {now} before griddepcontrol.wait")
        if (never := (launch >= self._unfinished.start) & (launch < self._unfinished.stop)).any():
            raise RaceError(f"global memory that launch {launch[never][0]} accesses is {now}, and no launch after it has waited for it")


@dataclass(slots=True)
class _Record:
    """Of a storage: its content after the last launch, and for each byte the last launches that stored and loaded it (0: none)."""

    storage: Any  # held, so that its address is not another tensor's meanwhile
    content: Bytes
    stored: Launches
    loaded: Launches


class Stream:
    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._launch = 0  # the number of the last one
        self._finished = 0  # the last launch that has ended when the next one begins, if that does not wait
        self._unfinished = range(0)  # launches that may still run when the next one has waited

    def begin(self, tensors: Tensors, granule: int, is_dependent: bool) -> Pending | None:
        """What a launch may not access yet; None if it begins after its predecessor has ended."""
        self._launch += 1
        if not is_dependent:
            self._finished, self._unfinished = self._launch - 1, range(0)
            return None
        stored, loaded = (np.zeros(len(tensors.memory.data), np.int32) for _ in range(2))
        for key, _storage, place in tensors.places():
            record = self._records.get(key)
            if record is not None:
                changed = record.content != tensors.memory.data[place]  # the host has stored since
                record.stored[changed] = record.loaded[changed] = 0
                stored[place], loaded[place] = record.stored, record.loaded
        return Pending(stored, loaded, granule, self._finished, self._unfinished)

    def end(self, tensors: Tensors, history: History, clocks: Iterable[Clock], is_dependent: bool) -> None:
        stored, loaded = (np.repeat(each, history.granule) for each in (history.written != 0, (history.loaded != 0) | history.copied))
        for key, storage, place in tensors.places():
            size = place.stop - place.start
            record = self._records.setdefault(key, _Record(storage, np.zeros(0), np.zeros(size, np.int32), np.zeros(size, np.int32)))
            record.content = tensors.memory.data[place].copy()
            record.stored[stored[place]] = record.loaded[loaded[place]] = self._launch
        clocks = list(clocks)
        if is_dependent and not any(clock.has_waited.any() for clock in clocks):
            self._unfinished = range(self._finished + 1, self._launch)
            return
        self._unfinished = range(0)
        if not is_dependent or any(clock.waited_first for clock in clocks):
            self._finished = self._launch - 1
