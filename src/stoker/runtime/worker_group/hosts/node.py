"""A node other than node 0: joins the rendezvous, starts its ranks, and passes the records of node 0 to them until the engine ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import torch

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, RankError
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings, describe_placement, place_ranks
from stoker.engine.reader import Engine
from stoker.runtime.worker_group.channels.channel import HEADER_SIZE
from stoker.runtime.worker_group.channels.tcp import StoppedError, TcpReader
from stoker.runtime.worker_group.follower_process import WaitingFollowers
from stoker.runtime.worker_group.hosts.link import HANDSHAKE_TIMEOUT_S, Link, LinkError, SecretError, open_link
from stoker.runtime.worker_group.hosts.messages import (
    BEAT,
    FAILED,
    JOIN,
    JOINED,
    MAX_TEXT,
    REJECTED,
    STATUS,
    STOP,
    Failure,
    JoinAnswer,
    JoinRequest,
    NodeStatus,
    decode,
    describe_node,
    encode,
)
from stoker.runtime.worker_group.hosts.remote_node import HEARTBEAT_TIMEOUT_S
from stoker.runtime.worker_group.local_ranks import LocalRanks, RankSetup
from stoker.runtime.worker_group.records import END

log = get_logger(__name__)

CONNECT_INTERVAL_S = 0.5  # between attempts while node 0 does not listen yet
BEAT_INTERVAL_S = 0.2
GRACE_S = 2.0  # time for ranks to end, and for node 0 to receive a failure


def run_node(
    engine: Engine, config: RuntimeConfig, devices: dict[int, torch.device], nodes: NodeSettings, joined: Callable[[list[int]], None]
) -> None:
    """Run the ranks of this node until node 0 ends the engine.

    `joined` is called with the ranks of this node when all nodes have joined. Raises ConfigError if node 0 rejects this node, and RankError
    if a rank, node 0 or the network between them fails.
    """
    facts = describe_node(engine, config, list(devices.values()), nodes.num_nodes)
    with WaitingFollowers(map(str, devices.values())) as waiting:  # they import while this node waits for the others
        node = Node(_connect(nodes), nodes)
        try:
            answer = node.join(JoinRequest(node_rank=nodes.node_rank, name=socket.gethostname()[:255], facts=facts))
            for line in describe_placement(engine.config.mapping, place_ranks(engine.config.mapping, nodes.num_nodes), answer.hosts):
                log.info("%s", line)
            joined(sorted(devices))
            node.run(engine, config, devices, answer, waiting)
        except LinkError as error:
            raise RankError(f"node 0 ({nodes.rendezvous}) {error}.") from None
        finally:
            node.close()


class Node:
    """The connection to node 0, and the ranks of this node. A thread sends heartbeats and watches the ranks."""

    def __init__(self, link: Link, nodes: NodeSettings) -> None:
        self._link, self._nodes = link, nodes
        self._ranks: LocalRanks | None = None
        self._failure: str | None = None
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="node", daemon=True)

    def join(self, request: JoinRequest) -> JoinAnswer:
        """Introduce this node, and wait until all nodes have joined. Raises ConfigError if node 0 rejects it."""
        self._link.send(JOIN, encode(request))
        self._watcher.start()
        while True:
            kind, body = self._link.receive(HEARTBEAT_TIMEOUT_S)
            if kind == REJECTED:
                raise ConfigError(f"{body.decode(errors='replace')}.", cure="Make both nodes equal.")
            if kind == STOP:
                raise RankError(f"node 0 has ended the engine: {body.decode(errors='replace')}")
            if kind == JOINED:
                return decode(body, JoinAnswer)
            if kind != BEAT:
                raise LinkError(f"sent a frame of the unknown kind {kind}")

    def run(
        self, engine: Engine, config: RuntimeConfig, devices: dict[int, torch.device], answer: JoinAnswer, waiting: WaitingFollowers
    ) -> None:
        """Give the ranks their tasks, and pass records to them until the END record."""
        setup = RankSetup(
            engine=str(engine.path), config=config, devices=devices, hosts=answer.hosts, address=answer.address, port=answer.port,
            store_prefix=answer.store_prefix, record_size=answer.record_size, step_timeout_s=answer.step_timeout_s,
        )  # fmt: skip
        self._ranks = ranks = LocalRanks(setup, sorted(devices), waiting)
        reader = TcpReader(self._link, answer.record_size, HEARTBEAT_TIMEOUT_S, self._status, self._check)
        try:
            while True:
                record = reader.receive(0.0)
                if record[0] == END:
                    self._end_watcher()
                    return ranks.end(time.monotonic() + GRACE_S)
                ranks.publish(tuple(record[:HEADER_SIZE]), record[HEADER_SIZE:], self._check)
                reader.release()
        except StoppedError as error:
            raise RankError(f"node 0 has ended the engine: {error}") from None

    def close(self) -> None:
        """End the ranks and close the connection."""
        self._end_watcher()
        if self._ranks is not None:
            self._ranks.kill()
        self._link.close()

    def _end_watcher(self) -> None:
        """End the thread, if it was started. From now on the end of a rank is no failure."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()

    def _check(self) -> None:
        """Raise RankError if a rank of this node has failed. Called while the connection is silent or the ranks are behind."""
        if self._failure is not None:
            raise RankError(self._failure)

    def _status(self) -> NodeStatus:
        """The progress of this node: nothing, before its ranks are started."""
        return NodeStatus(0, 0) if self._ranks is None else NodeStatus(self._ranks.num_reported(), self._ranks.released())

    def _watch(self) -> None:
        """The loop of a thread: send heartbeats, and report the first failed rank."""
        with contextlib.suppress(LinkError):  # which the thread that receives reports
            while not self._closing.wait(BEAT_INTERVAL_S):
                found = self._ranks.find_failure() if self._ranks is not None else None
                if found is None:
                    self._link.send(STATUS, encode(self._status()))
                    continue
                ranks = self._ranks
                assert ranks is not None
                message = ranks.describe_failure(found)
                self._link.send(FAILED, encode(Failure(message[:MAX_TEXT], found.follower.log_end(MAX_TEXT), found.is_cause)))
                ranks.terminate()
                self._closing.wait(GRACE_S)  # node 0 answers with STOP
                self._failure = message
                return


def _connect(nodes: NodeSettings) -> Link:
    """A connection to node 0, which may not listen yet. Raises RankError after the timeout of the settings."""
    secret, deadline = nodes.read_token(), time.monotonic() + nodes.rendezvous_timeout_s
    reported = False
    while True:
        try:
            return open_link(socket.create_connection(nodes.address, timeout=HANDSHAKE_TIMEOUT_S), secret)
        except OSError as error:
            reason = f"cannot be reached ({error.strerror or error})"
        except SecretError as error:
            raise ConfigError(f"node 0 ({nodes.rendezvous}) {error}.", cure="Use the same value on all nodes.") from None
        except LinkError as error:
            reason = str(error)
        if not reported:
            log.info("node %d waits for node 0 at %s, which %s.", nodes.node_rank, nodes.rendezvous, reason)
            reported = True
        if time.monotonic() > deadline:
            raise RankError(f"node 0 ({nodes.rendezvous}) {reason} within {nodes.rendezvous_timeout_s:g} s.")
        time.sleep(CONNECT_INTERVAL_S)
