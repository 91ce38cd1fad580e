"""Records over TCP: node 0 sends each record once to every other node, which publishes it to its own ranks in shared memory.

A record is one frame of the authenticated connection of the two nodes: HEADER_SIZE int32, then its numbers. There is no window of its own:
a node whose ranks are too far behind stops reading, and node 0 waits when the buffers of the connection are full.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stoker.runtime.worker_group.channels.channel import HEADER_SIZE, Numbers, PlanChannel, PlanReader
from stoker.runtime.worker_group.hosts.link import Link, LinkError
from stoker.runtime.worker_group.hosts.messages import BEAT, RECORD, STATUS, STOP, NodeStatus, encode
from stoker.runtime.worker_group.hosts.remote_node import RemoteNode


class TcpChannel(PlanChannel):
    """The leader's end. The readers are the other nodes."""

    def __init__(self, nodes: list[RemoteNode], record_size: int) -> None:
        self.record_size = record_size
        self._nodes = nodes
        self._num_published = 0

    def publish(self, header: tuple[int, ...], numbers: Numbers, check: Callable[[], None]) -> None:
        """Send a record to all nodes. Nodes whose connection has failed are skipped: their failure is reported by `check`."""
        padded = np.zeros(HEADER_SIZE, dtype=np.int32)
        padded[: len(header)] = header
        self._num_published += 1
        for node in self._nodes:
            try:
                node.link.send(RECORD, padded.data, numbers.data, check=check)
            except LinkError as error:
                node.fail(str(error))

    def heartbeats_ns(self) -> list[int]:
        """The monotonic time at which each node was last received from, in nanoseconds."""
        return [int(node.link.last_received * 1e9) for node in self._nodes]

    def positions(self) -> list[int]:
        """The number of records that all ranks of each node have processed."""
        return [node.status.released for node in self._nodes]

    def lags(self) -> list[int]:
        """The number of sent records that not all ranks of each node have processed."""
        return [self._num_published - position for position in self.positions()]

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes:
            node.close()


class StoppedError(Exception):
    """Node 0 has ended the engine. The message is its reason."""


class TcpReader(PlanReader):
    """The end of another node. `status` returns its progress; `check` is called while it waits, and raises when one of its ranks failed."""

    def __init__(
        self, link: Link, record_size: int, timeout_s: float, status: Callable[[], NodeStatus], check: Callable[[], None] = lambda: None
    ) -> None:
        link.max_bytes = max(link.max_bytes, 1 + 4 * (HEADER_SIZE + record_size))
        self._link, self._timeout_s, self._status, self._check = link, timeout_s, status, check

    def receive(self, spin_s: float) -> Numbers:
        """Wait for the next record. Raises LinkError if node 0 is silent for the timeout, and StoppedError if it has ended the engine."""
        while True:
            kind, body = self._link.receive(self._timeout_s, self._check)
            if kind == RECORD:
                if len(body) % 4 or len(body) < 4 * HEADER_SIZE:
                    raise LinkError(f"sent a record of {len(body)} bytes")
                return np.frombuffer(body, dtype=np.int32)
            if kind == STOP:
                raise StoppedError(body.decode(errors="replace"))
            if kind != BEAT:
                raise LinkError(f"sent a frame of the unknown kind {kind}")

    def release(self) -> None:
        """Nothing: the record has its own memory, and the progress of the ranks is part of each heartbeat."""

    def beat(self) -> None:
        """Send the progress of this node, which is also its heartbeat."""
        self._link.send(STATUS, encode(self._status()))
