"""A race detector, based on the memory consistency model of PTX (PTX ISA 8.7, chapter 8).

Every *granule* of a memory, the bytes of the kernel's smallest store, has stamps of its last write and read, and of the first proxy fence
since the write. A stamp is one int64:

    bit  60        59          58 – 44   43 – 28              27 – 12                       11 – 0
         stamped   by a copy   CTA       CTA barriers         warp barriers since the       thread, 1024 + warp (several lanes of it),
                   in bulk               before the access    CTA barrier, before it        or 2047 (several warps)

An access is ordered after a stamp of the same CTA by the same thread, by a CTA barrier, or by a warp barrier if it is of the same warp. It
is ordered after a stamp of another CTA if its thread acquired (`Clock.acquired`), or its CTA has had a barrier since one of its threads did
(`Clock.known`), what the other CTA released after a later CTA barrier. So a release covers what precedes a CTA barrier before it, and not
the releasing thread's own later stores, which PTX would include.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from emulated.memory import Bytes
    from emulated.stream import Pending

Stamps = NDArray[np.int64]
Threads = NDArray[np.int64]
Places = NDArray[np.int64]  # [accesses, granules]

STAMPED, BY_BULK_COPY = 1 << 60, 1 << 59
LANES, WARPS = 1024, 2047  # the field `thread` of several lanes of warp 0; of several warps
THREAD, COUNT, CTA = 0xFFF, 0xFFFF, 0x7FFF


class RaceError(AssertionError):
    """Two accesses to the same bytes, at least one of them a store, without an order between them."""


class Clock:
    """The logical clock of a CTA: the barriers that its threads have passed, and the accesses that are ordered before them."""

    def __init__(self, cta: int, num_ctas: int, num_threads: int, waits_for_predecessor: bool) -> None:
        self.cta, self.num_threads = cta, num_threads
        self.barriers = 1
        self.warp_barriers = np.zeros(num_threads // 32, np.int64)
        self.known = np.zeros(num_ctas, np.int64)  # per CTA: its accesses up to this number of barriers are ordered before ours
        self.acquired: dict[int, NDArray[np.int64]] = {}  # the same for single threads that have acquired more
        self.observed: list[NDArray[np.bool_]] = []  # per mbarrier: the threads that have waited for its bulk copy
        # Per thread: the CTA's barriers at its last proxy fence, and `known_by` at its last proxy fence of global memory.
        self.fenced = {space: np.zeros(num_threads, np.int64) for space in ("global", "shared")}
        self.fence_known: dict[int, NDArray[np.int64]] = {}
        self.has_waited = np.full(num_threads, not waits_for_predecessor)  # griddepcontrol.wait
        self.has_triggered = False  # griddepcontrol.launch_dependents
        self.waited_first = False
        self._base()

    def _base(self) -> None:
        self.base = STAMPED | self.cta << 44 | self.barriers << 28  # smaller stamps of this CTA are before the last barrier

    def stamps(self, threads: Threads) -> Stamps:
        return self.base | self.warp_barriers[threads >> 5] << 12 | threads

    def known_by(self, threads: Threads) -> NDArray[np.int64]:
        """[threads, CTAs]"""
        known = np.repeat(self.known[None], len(threads), 0)
        for thread, acquired in self.acquired.items():
            known[threads == thread] = np.maximum(self.known, acquired)
        return known

    def cta_barrier(self) -> None:
        self.barriers += 1
        self.warp_barriers[:] = 0
        for acquired in self.acquired.values():
            np.maximum(self.known, acquired, self.known)
        self.acquired.clear()
        for threads in self.observed:
            threads[:] = threads.any()
        if self.fence_known:
            everywhere = np.maximum.reduce(list(self.fence_known.values()))
            self.fence_known = {-1: everywhere}
        self.has_waited[:] = self.has_waited.any()
        self._base()

    def warp_barrier(self, threads: NDArray[np.bool_] | None) -> None:
        if threads is None:
            self.warp_barriers += 1
        else:
            self.warp_barriers[threads.reshape(-1, 32).any(1)] += 1
        for thread, acquired in list(self.acquired.items()):
            if threads is None or threads[thread]:
                for lane in range(thread & ~31, (thread & ~31) + 32):
                    self.acquired[lane] = np.maximum(acquired, self.acquired.get(lane, 0))

    def release(self, thread: int) -> NDArray[np.int64]:
        """The barriers per CTA that a thread becomes ordered after when it acquires this release of `thread`."""
        released = np.maximum(self.known, self.acquired.get(thread, 0))
        released[self.cta] = self.barriers - 1
        return released

    def acquire(self, thread: int, released: NDArray[np.int64]) -> None:
        self.acquired[thread] = np.maximum(released, self.acquired.get(thread, 0))

    def wait_for_predecessor(self, threads: NDArray[np.bool_] | None) -> None:
        self.has_waited[slice(None) if threads is None else threads] = True
        self.waited_first |= not self.has_triggered

    def is_after(self, stamps: Stamps, threads: Threads) -> NDArray[np.bool_]:
        """Whether accesses [accesses, granules] by `threads` [accesses] come after what the stamps record."""
        ordered = (stamps < self.base) & (stamps >> 44 & CTA == self.cta) | (stamps == 0)
        if ordered.all():
            return ordered
        row, column = np.nonzero(~ordered)
        stamp, thread = stamps[row, column], threads[row]
        who = stamp & THREAD
        is_mine = stamp >> 44 == self.base >> 44
        warp = np.where(who < LANES, who >> 5, np.where(who < WARPS, who - LANES, -1))
        later = is_mine & ((who == thread) | (warp == thread >> 5) & ((stamp >> 12 & COUNT) < self.warp_barriers[thread >> 5]))
        if (is_copy := stamp & BY_BULK_COPY != 0).any():
            later |= is_copy
            for i in np.unique(stamp[is_copy] >> 28 & COUNT):
                mine = is_copy & (stamp >> 28 & COUNT == i)
                later[mine] = self.observed[i][thread[mine]]
        if (is_other := ~is_mine & ~is_copy).any():
            known = self.known_by(thread[is_other])
            by, barriers = stamp[is_other] >> 44 & CTA, stamp[is_other] >> 28 & COUNT
            later[is_other] = barriers <= known[np.arange(len(by)), by]
        ordered[row, column] = later
        return ordered


class History:
    """The stamps of one memory of `size` bytes that begins at address `begin`. Its methods raise RaceError.

    space: "global" or "shared". granule: bytes per stamp. has_async_proxy: whether the kernel has bulk copies or wgmma.
    pending: the accesses of earlier launches that may still run.
    """

    def __init__(self, space: str, size: int, begin: int, granule: int, has_async_proxy: bool, pending: Pending | None = None) -> None:
        self.space, self.granule = space, granule
        self._begin, self._pending = begin, pending
        count = -(-size // granule)
        self.written, self.loaded = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._polled = np.zeros(count, np.int64)  # the last strong load of the value
        self.copied = np.zeros(count, np.bool_)  # loaded by a copy; when is not recorded
        self._fenced = np.zeros(count if has_async_proxy else 0, np.int64)
        self._released: dict[int, NDArray[np.int64]] = {}  # by address

    def _places(self, addresses: NDArray[np.int64], size: int) -> Places:
        first = (addresses - self._begin) // self.granule
        return first[:, None] + np.arange(max(1, size // self.granule))

    def load(self, clock: Clock, threads: Threads, addresses: NDArray[np.int64], size: int, is_strong: bool = False) -> None:
        """is_strong: `.relaxed`, `.acquire` or `.volatile`. May be concurrent with stores: the loaded value says which came before."""
        places = self._places(addresses, size)
        self._require_wait(clock, threads, places, "loaded")
        mine = clock.stamps(threads)[:, None]
        if is_strong:
            self._polled[places] = mine
            return
        self._require_order(clock, self.written[places], threads, "loaded", "stored")
        before = self.loaded[places]
        if not self._precede_barrier(clock, before) and not (alone := clock.is_after(before, threads)).all():
            mine = np.where(alone, mine, _both(before, mine))
        self.loaded[places] = mine
        loaded = self.loaded[places]
        if np.count_nonzero(shared := loaded != mine):  # several threads load the granule
            self.loaded[places[shared]] = _both(loaded, np.broadcast_to(mine, places.shape))[shared]

    def was_stored(self, addresses: NDArray[np.int64], size: int) -> bool:
        return bool(self.written[self._places(addresses, size)].any())

    def load_by_copy(self, clock: Clock, threads: Threads, addresses: NDArray[np.int64], size: int) -> None:
        """Record the source of a cp.async when it is issued."""
        places = self._places(addresses, size)
        self._require_wait(clock, threads, places, "copied")
        self._require_order(clock, self.written[places], threads, "copied", "stored")
        self.copied[places] = True

    def store(self, clock: Clock, threads: Threads, addresses: NDArray[np.int64], values: Bytes, before: Bytes) -> None:
        """before: what the memory holds. Stores of the same value do not have to be ordered; those of several CTAs then leave no stamp."""
        places = self._places(addresses, values.shape[1])
        is_same = (values == before).reshape(*places.shape, -1).all(2)
        self._require_order_of_store(clock, threads, places, is_same)
        is_common = is_same & (self.written[places] != 0) & (self.written[places] >> 44 & CTA != clock.cta)
        self._stamp_store(places, np.where(is_common, 0, clock.stamps(threads)[:, None]))

    def issue_copy(self, clock: Clock, threads: Threads, addresses: NDArray[np.int64], size: int) -> None:
        """Check the destination of a copy when it is issued."""
        self._require_order_of_store(clock, threads, self._places(addresses, size))

    def store_by_copy(self, clock: Clock, threads: Threads, addresses: NDArray[np.int64], size: int) -> None:
        """Record the destination of a cp.async when its thread has waited for it."""
        self._stamp_store(self._places(addresses, size), clock.stamps(threads)[:, None])

    def _require_order_of_store(self, clock: Clock, threads: Threads, places: Places, is_same: NDArray[np.bool_] | None = None) -> None:
        self._require_wait(clock, threads, places, "stored")
        loaded, written, polled = self.loaded[places], self.written[places], self._polled[places]
        written[(loaded != 0) | (polled != 0) & clock.is_after(polled, threads)] = 0  # what comes after a load comes after the loaded store
        if is_same is not None:
            written[is_same] = 0
            loaded[is_same] = 0
        self._require_order(clock, loaded, threads, "stored", "loaded")
        self._require_order(clock, written, threads, "stored", "stored")

    def _stamp_store(self, places: Places, stamps: Stamps) -> None:
        self.written[places], self.loaded[places], self._polled[places] = stamps, 0, 0
        if len(self._fenced):
            self._fenced[places] = 0

    def atomic(self, clock: Clock, thread: int, address: int, size: int, semantics: str) -> None:
        """A read-modify-write. semantics: relaxed, acquire, release or acq_rel."""
        threads, places = np.array([thread]), self._places(np.array([address]), size)
        self._require_wait(clock, threads, places, "stored")
        if semantics in ("acquire", "acq_rel"):
            self.acquire(clock, thread, address)
        if semantics in ("release", "acq_rel"):
            self._released[address] = np.maximum(clock.release(thread), self._released.get(address, 0))
        self._stamp_store(places, clock.stamps(threads)[:, None])

    def acquire(self, clock: Clock, thread: int, address: int) -> None:
        if address in self._released:
            clock.acquire(thread, self._released[address])

    def release(self, clock: Clock, thread: int, address: int) -> None:
        self._released[address] = clock.release(thread)

    # The async proxy: bulk copies and wgmma.

    def proxy_fence(self, clock: Clock, threads: NDArray[np.bool_] | None) -> None:
        """fence.proxy.async: what these threads have stored, or are ordered after, precedes what the async proxy does after the fence."""
        who = np.arange(clock.num_threads) if threads is None else np.flatnonzero(threads)
        clock.fenced[self.space][who] = clock.barriers
        if self.space == "global":
            clock.fence_known |= dict(zip(who.tolist(), clock.known_by(who), strict=True))
        if not len(self._fenced):
            return
        written = np.flatnonzero((self.written != 0) & (self._fenced == 0) & (self.written >> 44 & CTA == clock.cta))
        stamps = self.written[written]
        is_own = np.isin(stamps & THREAD, who)
        covered = is_own | (stamps < clock.base)
        self._fenced[written[covered]] = clock.stamps(np.where(is_own, stamps & THREAD, who[0])[covered])

    def async_load(self, clock: Clock, thread: int, addresses: NDArray[np.int64], size: int) -> None:
        """Record a load by a bulk copy, or by the wgmma of the warp whose first thread is `thread`."""
        places, threads = self._places(addresses, size), np.full(len(addresses), thread)
        self._require_wait(clock, threads, places, "read by the async proxy")
        self._require_order(clock, self.written[places], threads, "read by the async proxy", "stored")
        self._require_fence(clock, places, threads, "read")
        if self.space == "shared":
            self.loaded[places] = clock.stamps(np.array([thread]))[0] & ~THREAD | LANES + (thread >> 5)
        else:
            self.copied[places] = True

    def issue_bulk_copy(self, clock: Clock, thread: int, addresses: NDArray[np.int64], size: int) -> None:
        places, threads = self._places(addresses, size), np.full(len(addresses), thread)
        self._require_order_of_store(clock, threads, places)
        self._require_fence(clock, places, threads, "stored")

    def store_by_bulk_copy(self, addresses: NDArray[np.int64], size: int, number: int) -> None:
        """number: the mbarrier's in `Clock.observed`."""
        places = self._places(addresses, size)
        self._stamp_store(places, np.int64(STAMPED | BY_BULK_COPY | number << 28))
        self._fenced[places] = self.written[places]  # needs no fence

    def _require_fence(self, clock: Clock, places: Places, threads: Threads, what: str) -> None:
        written, fenced = self.written[places], self._fenced[places]
        if fenced.all() and self._precede_barrier(clock, fenced):
            return
        by, barriers = written >> 44 & CTA, written >> 28 & COUNT
        done = (written == 0) | (fenced != 0) & clock.is_after(fenced, threads)
        done |= (by == clock.cta) & (barriers < clock.fenced[self.space][threads][:, None])  # the reader's own fence
        for thread in (-1, int(threads[0])):
            if thread in clock.fence_known:
                done |= (by != clock.cta) & (barriers <= clock.fence_known[thread][np.minimum(by, len(clock.known) - 1)])
        if not done.all():
            raise RaceError(f"{self.space} memory is {what} by the async proxy without a fence.proxy.async after {_who(written[~done][0])}")

    def _precede_barrier(self, clock: Clock, stamps: Stamps) -> bool:
        """A fast test: True if all stamps precede the CTA's last barrier. False does not mean that they are unordered."""
        return bool(stamps.max(initial=0) < (clock.base if self.space == "shared" else 1))

    def _require_order(self, clock: Clock, stamps: Stamps, threads: Threads, now: str, before: str) -> None:
        if self._precede_barrier(clock, stamps) or (ordered := clock.is_after(stamps, threads)).all():
            return
        row, column = np.argwhere(~ordered)[0]
        raise RaceError(
            f"{self.space} memory is {now} by thread {threads[row]} of CTA {clock.cta}, and was {before} by {_who(stamps[row, column])}; "
            "nothing orders the two"
        )

    def _require_wait(self, clock: Clock, threads: Threads, places: Places, now: str) -> None:
        if self._pending is not None:
            self._pending.check(places, clock.has_waited[threads][:, None], now)


def _both(first: Stamps, second: Stamps) -> Stamps:
    """A stamp that stands for two concurrent loads: a later store must be ordered after both."""
    same = _warp(first) == _warp(second)
    return np.maximum(first, second) & ~THREAD | np.where(same & (_warp(first) >= 0), LANES + _warp(first), WARPS)


def _warp(stamps: Stamps) -> NDArray[np.int64]:
    who = stamps & THREAD
    return np.where(who < LANES, who >> 5, np.where(who < WARPS, who - LANES, -1))


def _who(stamp: Any) -> str:
    stamp = int(stamp)
    if stamp & BY_BULK_COPY:
        return "a bulk copy"
    who = stamp & THREAD
    thread = f"thread {who}" if who < LANES else f"several lanes of warp {who - LANES}" if who < WARPS else "several warps"
    return f"{thread} of CTA {stamp >> 44 & CTA} after {stamp >> 28 & COUNT} barriers"


class NoHistory(History):
    """A memory whose accesses are not checked: warps are ordered by mbarriers and by barriers of some warps, which have no stamps."""

    def __init__(self, space: str) -> None:
        super().__init__(space, 0, 0, 16, False)

    def load(self, *_: Any) -> None:
        """Not recorded, like all accesses below."""

    store = issue_copy = load_by_copy = store_by_copy = async_load = issue_bulk_copy = store_by_bulk_copy = load
    proxy_fence = acquire = release = atomic = load

    def was_stored(self, addresses: NDArray[np.int64], size: int) -> bool:
        return False
