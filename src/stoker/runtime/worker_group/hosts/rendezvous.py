"""The rendezvous on node 0: listens until all other nodes have joined, and rejects those that cannot run with it."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
import time
from collections.abc import Callable

from stoker.base.errors import RankError
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings
from stoker.runtime.worker_group.hosts.link import HANDSHAKE_TIMEOUT_S, Link, LinkError, accept_link
from stoker.runtime.worker_group.hosts.listener import MAX_PENDING, listen
from stoker.runtime.worker_group.hosts.messages import JOIN, REJECTED, Facts, JoinRequest, decode, find_difference
from stoker.runtime.worker_group.hosts.remote_node import RemoteNode

log = get_logger(__name__)

ACCEPT_INTERVAL_S = 0.2
REPORT_INTERVAL_S = 30.0  # between messages about missing nodes, of which the first one is logged at once


class Rendezvous:
    """The listening socket of node 0, and the nodes that have joined."""

    def __init__(self, settings: NodeSettings, facts: Facts) -> None:
        """Listen. Raises ConfigError if the port cannot be used."""
        self._settings, self._facts, self._secret = settings, facts, settings.read_token()
        self._nodes: dict[int, RemoteNode] = {}
        self._rejected: dict[int, str] = {}
        self._lock = threading.Lock()
        self._pending = threading.BoundedSemaphore(MAX_PENDING)
        self._listener = listen(settings)
        self._listener.settimeout(ACCEPT_INTERVAL_S)

    def gather(self, check: Callable[[], None] = lambda: None) -> list[RemoteNode]:
        """Wait until all nodes have joined. Raises RankError, which names the missing nodes, after the timeout of the settings."""
        started, reported = time.monotonic(), -math.inf
        with self._listener:
            while missing := self._missing():
                now = time.monotonic()
                if now - started > self._settings.rendezvous_timeout_s:
                    self.close()
                    within = f"within {self._settings.rendezvous_timeout_s:g} s"
                    raise RankError(f"{_names(missing)} did not join{self._cause(missing)} {within}.")
                if now - reported > REPORT_INTERVAL_S:
                    reported = now
                    log.info("waiting at %s for %s%s.", self._settings.rendezvous, _names(missing), self._cause(missing))
                check()
                for node in self._nodes.copy().values():  # which would otherwise end, because node 0 is silent
                    node.beat()
                with contextlib.suppress(TimeoutError):
                    self._begin(self._listener.accept()[0])
        return [self._nodes[rank] for rank in sorted(self._nodes)]

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            node.close()

    def _missing(self) -> list[int]:
        """The ranks of the nodes that have not joined. Nodes whose connection has ended since then are removed."""
        with self._lock:
            for rank, node in list(self._nodes.items()):
                if node.has_ended.is_set():
                    log.warning("%s before all nodes had joined.", node.failure)
                    del self._nodes[rank]
            return [rank for rank in range(1, self._settings.num_nodes) if rank not in self._nodes]

    def _cause(self, missing: list[int]) -> str:
        """Why the first of the missing nodes was rejected, in parentheses after a space; empty if none was rejected."""
        causes = [self._rejected[rank] for rank in missing if rank in self._rejected]
        return f" ({causes[0]})" if causes else ""

    def _begin(self, connection: socket.socket) -> None:
        """Start a thread for a new connection, so that a slow client delays no other one."""
        if not self._pending.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._handshake, args=(connection,), name="handshake", daemon=True).start()

    def _handshake(self, connection: socket.socket) -> None:
        """Perform the handshake with a client, and register it as a node or reject it."""
        peer = _peer(connection)
        try:
            link = accept_link(connection, self._secret)
            kind, body = link.receive(HANDSHAKE_TIMEOUT_S)
            if kind != JOIN:
                raise LinkError(f"sent a frame of kind {kind} instead of its greeting")
            self._register(link, decode(body, JoinRequest))
        except LinkError as error:
            log.warning("a client at %s was refused: it %s.", peer, error)
            connection.close()
        finally:
            self._pending.release()

    def _register(self, link: Link, request: JoinRequest) -> None:
        """Add a node, or reject it with the reason."""
        with self._lock:
            rank, reason = request.node_rank, self._find_problem(request)
            if reason is None:
                self._nodes[rank] = node = RemoteNode(link, request)
                log.info("%s has joined.", node.name)
                return
        text = f"node {rank} ({request.name}, {link.remote_host}) is rejected: {reason}"
        self._rejected[rank] = text
        log.error("%s.", text)
        with contextlib.suppress(LinkError):
            link.send(REJECTED, text.encode())
        link.close()

    def _find_problem(self, request: JoinRequest) -> str | None:
        """Why a node cannot join; None if it can."""
        if (difference := find_difference(self._facts, request.facts)) is not None:
            return difference
        if not 0 < request.node_rank < self._settings.num_nodes:
            return f"node_rank is {request.node_rank}, and the ranks of the other nodes are 1 to {self._settings.num_nodes - 1}"
        if (known := self._nodes.get(request.node_rank)) is not None and not known.has_ended.is_set():
            return f"{known.name} has joined with the same node_rank"
        return None


def node_addresses(nodes: list[RemoteNode]) -> list[str]:
    """The address of each node, node 0 first, at which the others reach it. Nodes on the same host have the same address."""
    remote = [node for node in nodes if not _is_loopback(node.host)]
    own = remote[0].link.local_host if remote else "127.0.0.1"
    return [own, *(own if _is_loopback(node.host) else node.host for node in nodes)]


def _names(ranks: list[int]) -> str:
    """ "node 1", or "nodes 1, 2"."""
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_loopback(host: str) -> bool:
    """Whether an address is of this host only."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _peer(connection: socket.socket) -> str:
    """The address of the other end, for messages."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "an unknown address"
