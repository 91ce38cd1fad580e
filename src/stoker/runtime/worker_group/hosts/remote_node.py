"""Another node, as node 0 sees it: its progress, its failure, and the end of its ranks."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path

from stoker.runtime.worker_group.hosts.link import Link, LinkError
from stoker.runtime.worker_group.hosts.messages import BEAT, FAILED, STATUS, STOP, Failure, JoinRequest, NodeStatus, decode

HEARTBEAT_TIMEOUT_S = 5.0  # a node from which nothing arrives for this time has failed, or the network between the hosts


class RemoteNode:
    """A node that has joined. A thread receives its messages."""

    def __init__(self, link: Link, request: JoinRequest) -> None:
        self.link, self.rank, self.host = link, request.node_rank, link.remote_host
        self.name = f"node {request.node_rank} ({request.name}, {self.host})"
        self.status = NodeStatus(0, 0)
        self.failure: str | None = None  # a sentence without its full stop, or several
        self.is_cause = True  # of the failure; False if the failure of a rank on another node may be the reason
        self.has_ended = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name=f"node {self.rank}", daemon=True)
        self._receiver.start()

    def fail(self, reason: str) -> None:
        """Record the failure of the connection, unless a failure is known already. `reason` is the end of a sentence about the node."""
        self.failure = self.failure or f"{self.name} {reason}"

    def beat(self) -> None:
        """Send a heartbeat, unless data is on its way."""
        with contextlib.suppress(LinkError):  # which the receiving thread finds, too
            self.link.send_if_idle(BEAT)

    def stop(self, reason: str) -> None:
        """Make the node end its ranks because of a failure, which it then logs."""
        with contextlib.suppress(LinkError, TimeoutError):
            self.link.send(STOP, reason.encode(), check=_give_up)

    def close(self) -> None:
        """Close the connection, upon which the node ends its ranks."""
        self.link.close()
        self._receiver.join()

    def _receive(self) -> None:
        """The loop of the thread."""
        try:
            while True:
                kind, body = self.link.receive(HEARTBEAT_TIMEOUT_S)
                if kind == STATUS:
                    self.status = decode(body, NodeStatus)
                elif kind == FAILED:
                    failure = decode(body, Failure)
                    self.is_cause = failure.is_cause
                    self.failure = self.failure or f"{self.name}: {failure.message} Its log is saved in {self._save_log(failure.log)}"
                else:
                    raise LinkError(f"sent a frame of the unknown kind {kind}")
        except LinkError as error:
            self.fail(str(error))
            self.has_ended.set()

    def _save_log(self, log: str) -> Path:
        """Write the end of a rank's log to a new file on this host."""
        folder = Path(tempfile.gettempdir())
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="stoker-node-"))
            (folder / f"node{self.rank}.log").write_text(log)
        return folder / f"node{self.rank}.log"


def _give_up() -> None:
    """Raise TimeoutError: the node does not read."""
    raise TimeoutError
