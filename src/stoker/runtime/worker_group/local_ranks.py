"""The follower ranks of one node: their processes, the plan channel in shared memory, and the detection of failures."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from stoker.base.config import RuntimeConfig
from stoker.runtime.worker_group.channels.channel import Numbers
from stoker.runtime.worker_group.channels.shared_memory import SharedMemoryChannel
from stoker.runtime.worker_group.follower import FollowTask
from stoker.runtime.worker_group.follower_process import FollowerProcess, WaitingFollowers
from stoker.runtime.worker_group.records import END

HEARTBEAT_TIMEOUT_S = 5.0  # a process without a heartbeat for this time is stopped or stuck


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of an engine have in common, and the settings of this node."""

    engine: str  # directory on this node
    config: RuntimeConfig
    devices: dict[int, torch.device]  # of each rank on this node
    hosts: tuple[str, ...]  # address of each rank
    address: str  # of the rendezvous store
    port: int
    store_prefix: str
    record_size: int
    step_timeout_s: float


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A follower that has failed."""

    follower: FollowerProcess
    reason: str  # the end of a sentence about the rank
    is_cause: bool  # False if another rank may have failed before: a rank ends with a status when its peer closes a connection


class LocalRanks:
    """The follower ranks `ranks`, one process each. `waiting`: processes that are running already."""

    def __init__(self, setup: RankSetup, ranks: list[int], waiting: WaitingFollowers) -> None:
        self.channel = SharedMemoryChannel(len(ranks), setup.record_size)
        self._step_timeout_s = setup.step_timeout_s
        self._positions: dict[int, tuple[int, float]] = {}  # reader → its last position, and since when it is there
        self.followers: list[FollowerProcess] = []
        self._is_closed = False
        try:
            for reader, rank in enumerate(ranks):
                task = FollowTask(
                    engine=setup.engine, rank=rank, reader=reader, device=str(setup.devices[rank]), config=setup.config, hosts=setup.hosts,
                    address=setup.address, port=setup.port, store_prefix=setup.store_prefix, channel=self.channel.address,
                )  # fmt: skip
                self.followers.append(waiting.take(task.device))
                self.followers[-1].assign(task)
        except BaseException:
            self.kill()
            raise

    def num_reported(self) -> int:
        """The number of states that every follower has reported."""
        return min((follower.num_reported() for follower in self.followers), default=1 << 30)

    def publish(self, header: tuple[int, ...], numbers: Numbers, check: Callable[[], None]) -> None:
        """Publish a record to all followers."""
        if self.followers:
            self.channel.publish(header, numbers, check)

    def released(self) -> int:
        """The number of records that all followers have processed."""
        return min(self.channel.positions(), default=0)

    def find_failure(self) -> FailedRank | None:
        """A follower that has ended, sends no heartbeats or does not proceed, causes before consequences; None if all are well."""
        consequence: FailedRank | None = None
        now = time.monotonic_ns()
        heartbeats, lags, positions = self.channel.heartbeats_ns(), self.channel.lags(), self.channel.positions()
        for reader, follower in enumerate(self.followers):
            if follower.process.poll() is not None:
                failed = FailedRank(follower, follower.exit_reason, is_cause=follower.was_killed)
                if failed.is_cause:
                    return failed
                consequence = consequence or failed
                continue
            if heartbeats[reader] and (now - heartbeats[reader]) / 1e9 > HEARTBEAT_TIMEOUT_S:
                return FailedRank(follower, f"has sent no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s", is_cause=True)
            if self._stalled_s(reader, positions[reader], lags[reader]) > self._step_timeout_s:
                return FailedRank(follower, "is stuck in a step", is_cause=True)
        return consequence

    def describe_failure(self, failed: FailedRank) -> str:
        """Save the logs of all followers in a new folder, and return the error message."""
        return failed.follower.describe_failure(failed.reason, self.save_logs())

    def save_logs(self) -> Path:
        """Save the logs of all followers in a new folder. Returns the folder."""
        folder = Path(tempfile.gettempdir())
        with contextlib.suppress(OSError):  # the failure is reported even if the disk is full
            folder = Path(tempfile.mkdtemp(prefix="stoker-ranks-"))
            for follower in self.followers:
                follower.save_log(folder)
        return folder

    def terminate(self) -> None:
        """Kill all processes, without waiting for them."""
        for follower in self.followers:
            follower.process.kill()

    def end(self, deadline: float) -> None:
        """Make all followers end, wait for them until the monotonic time `deadline`, and kill those that are still running."""

        def give_up() -> None:
            """Raise TimeoutError after the deadline."""
            if time.monotonic() > deadline:
                raise TimeoutError

        with contextlib.suppress(TimeoutError):  # a rank that reads no more records is killed below
            self.publish((END,), np.empty(0, dtype=np.int32), give_up)
        for follower in self.followers:
            while follower.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """Kill all followers, wait for them, and close the channel. Does nothing if they were killed already."""
        if self._is_closed:
            return
        self._is_closed = True
        for follower in self.followers:
            follower.kill()
        self.channel.close()

    def _stalled_s(self, reader: int, position: int, lag: int) -> float:
        """The seconds for which a reader has been at `position` although it has further records to read."""
        now = time.monotonic()
        known = self._positions.get(reader)
        if known is None or known[0] != position or lag == 0:
            self._positions[reader] = (position, now)
            return 0.0
        return now - known[1]
