"""Launches of one stream. A launch may begin before the previous one has ended (programmatic dependent launch, PDL).

The emulator runs them one after another. For each byte it records the launches that last stored and loaded it, and so detects accesses that
could overlap on a device.
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
    """The accesses of earlier launches that may still run while this launch does."""

    def __init__(self, stored: Launches, loaded: Launches, granule: int, finished: int, unfinished: range) -> None:
        self._stored, self._loaded = (each.reshape(-1, granule).max(1) for each in (stored, loaded))
        self._finished, self._unfinished = finished, unfinished

    def check(self, places: NDArray[np.int64], has_waited: NDArray[np.bool_], now: str) -> None:
        """Raises RaceError if an access conflicts with a launch that may still run.

        places: granules [accesses, granules]. has_waited: whether the accessing threads have executed griddepcontrol.wait [accesses, 1].
        now: "loaded", "copied", "stored" or another verb for the message.
        """
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
    """The state of one storage: its content after the last launch, and per byte the last launches that stored and loaded it (0: none)."""

    storage: Any  # a reference, so that its address is not reused for another tensor
    content: Bytes
    stored: Launches
    loaded: Launches


class Stream:
    """The launches so far, and which of them may still run."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._launch = 0  # the number of the last one
        self._finished = 0  # the last launch that has ended when the next one begins, if that does not wait
        self._unfinished = range(0)  # launches that may still run when the next one has waited

    def begin(self, tensors: Tensors, granule: int, is_dependent: bool) -> Pending | None:
        """Begin a launch. Returns the accesses that may still run; None if the previous launch has ended."""
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
        """Record the accesses of the launch that has run, and which launches may overlap the next one."""
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
