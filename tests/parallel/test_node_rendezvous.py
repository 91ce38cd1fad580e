"""The rendezvous of nodes: strangers, damaged frames and nodes that run something else are rejected, and others still join."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from free_ports import free_port
from node_links import FACTS, SECRET, link_pair, socket_pair

from stoker.base.config import Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, RankError
from stoker.base.nodes import NodeSettings, describe_placement, place_ranks
from stoker.runtime.worker.devices import rank_devices
from stoker.runtime.worker_group.channels.tcp import StoppedError, TcpReader
from stoker.runtime.worker_group.follower_process import FollowerProcess
from stoker.runtime.worker_group.hosts import link as links
from stoker.runtime.worker_group.hosts.link import Link, LinkError, SecretError, accept_link, open_link
from stoker.runtime.worker_group.hosts.messages import (
    FAILED,
    JOIN,
    RECORD,
    REJECTED,
    STATUS,
    STOP,
    Failure,
    JoinRequest,
    NodeStatus,
    encode,
)
from stoker.runtime.worker_group.hosts.node import Node
from stoker.runtime.worker_group.hosts.remote_node import RemoteNode
from stoker.runtime.worker_group.hosts.rendezvous import Rendezvous
from stoker.runtime.worker_group.leader import first_failure
from stoker.runtime.worker_group.local_ranks import FailedRank

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", TOKEN)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_frames_arrive_in_both_directions() -> None:
    server, client = link_pair()
    server.send(RECORD, b"ab", memoryview(struct.pack("<2i", 1, 2)))
    client.send(STATUS)
    assert client.receive(5) == (RECORD, b"ab" + struct.pack("<2i", 1, 2)) and server.receive(5) == (STATUS, b"")
    assert (server.local_host, server.remote_host) == ("127.0.0.1", "127.0.0.1")
    server.close()
    with pytest.raises(LinkError, match="closed the connection"):
        client.receive(5)
    with pytest.raises(LinkError, match="closed the connection"):
        server.send(STATUS)
    client.close()


def test_a_silent_end_is_detected() -> None:
    server, client = link_pair()
    with pytest.raises(LinkError, match=r"has sent nothing for 0\.3 s"):
        client.receive(0.3)
    server.close()
    client.close()


@pytest.mark.parametrize("side", [accept_link, open_link])
@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64, "is not a node of this version of Stoker"),
        (links.MAGIC + bytes(64), "has another shared secret"),
        (b"", "closed the connection"),
    ],
)
def test_strangers_fail_the_handshake(side: object, sent: bytes, message: str) -> None:
    ours, theirs = socket_pair()
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkError, match=message):
        side(ours, SECRET)  # type: ignore[operator]
    ours.close()
    theirs.close()


def test_both_ends_need_the_same_secret() -> None:
    server, client = socket_pair()
    caught: list[LinkError] = []

    def accept() -> None:
        with pytest.raises(SecretError) as error:
            accept_link(server, b"other" * 8)
        caught.append(error.value)
        server.close()

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(SecretError, match="shared secret"):
        open_link(client, SECRET)
    thread.join()
    assert caught
    client.close()


def raw_frames(*kinds: int) -> tuple[Link, socket.socket, list[bytes]]:
    """(receiver, raw socket to it, frames that an authenticated sender would have sent)."""
    server, client = link_pair()
    ours, theirs = socket_pair()
    tap = Link(ours, client._send_key, client._receive_key)
    frames = []
    for kind in kinds:
        tap.send(kind, b"body")
        frames.append(theirs.recv(1 << 16))
    return server, client._socket, frames


def damage(frames: list[bytes], how: str) -> bytes:
    first, second = frames
    if how == "changed":
        return first[:-1] + b"Y"
    if how == "another kind":
        return first[:20] + bytes([STOP]) + first[21:]
    if how == "repeated":
        return first + first
    if how == "reordered":
        return second + first
    if how == "too large":
        return struct.pack("<I", links.MAX_CONTROL_BYTES + 1) + first[4:]
    return struct.pack("<I", 0) + first[4:]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("changed", "wrong authentication code"),
        ("another kind", "wrong authentication code"),
        ("repeated", "wrong authentication code"),
        ("reordered", "wrong authentication code"),
        ("too large", "sent a frame of 1048577 bytes, and at most 1048576 are allowed"),
        ("empty", "sent a frame of 0 bytes"),
    ],
)
def test_damaged_frames_are_detected(how: str, message: str) -> None:
    receiver, raw, frames = raw_frames(STATUS, STATUS)
    raw.setblocking(True)
    raw.sendall(damage(frames, how))
    if how == "repeated":
        assert receiver.receive(5) == (STATUS, b"body")
    with pytest.raises(LinkError, match=message):
        receiver.receive(5)


def settings_of(num_nodes: int = 3, **more: object) -> NodeSettings:
    return NodeSettings(num_nodes=num_nodes, rendezvous=f"127.0.0.1:{free_port()}", **more)  # type: ignore[arg-type]


class Gathering:
    """A rendezvous that runs in a thread."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.nodes: list[RemoteNode] = []
        self.rendezvous = Rendezvous(settings, FACTS)
        self.thread = threading.Thread(target=lambda: self.nodes.extend(self.rendezvous.gather()), daemon=True)
        self.thread.start()

    def connect(self) -> Link:
        return open_link(socket.create_connection(self.settings.address), self.settings.read_token())

    def join(self, rank: int, **changes: object) -> Link:
        link = self.connect()
        link.send(JOIN, encode(JoinRequest(node_rank=rank, name=f"h{rank}", facts=msgspec.structs.replace(FACTS, **changes))))
        return link

    def reject(self, rank: int, **changes: object) -> str:
        kind, body = self.join(rank, **changes).receive(5)
        assert kind == REJECTED
        return body.decode()

    def finish(self) -> None:
        """The missing nodes join."""
        links = [self.join(rank) for rank in self.rendezvous._missing()]
        self.thread.join(10)
        assert [node.rank for node in self.nodes] == [1, 2] and len(links) <= 2
        self.rendezvous.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "def"}, "the engine is def there, and abc on node 0"),
        ({"version": "1.1"}, "Stoker is 1.1 there, and 1 on node 0"),
        ({"torch": "3"}, "PyTorch is 3 there, and 2 on node 0"),
        ({"device": "NVIDIA H100"}, "the device is NVIDIA H100 there, and cpu (x86_64) on node 0"),
        ({"num_nodes": 2}, "nnodes is 2 there, and 3 on node 0"),
        ({"settings": {"kv_cache_tokens": 2048}}, "kv_cache_tokens is 2048 there, and 1024 on node 0"),
    ],
)
def test_nodes_that_run_something_else_are_rejected_with_both_values(changes: dict[str, object], message: str) -> None:
    gathering = Gathering(settings_of())
    found = gathering.reject(1, **changes)
    assert found == f"node 1 (h1, 127.0.0.1) is rejected: {message}"
    gathering.finish()


def test_a_node_rank_joins_once_and_exists() -> None:
    gathering = Gathering(settings_of())
    first = gathering.join(1)
    wait_until(lambda: 1 in gathering.rendezvous._nodes)
    assert "node 1 (h1, 127.0.0.1) has joined with the same node_rank" in gathering.reject(1)
    for rank in (0, 3, -1, 1 << 40):
        assert "the ranks of the other nodes are 1 to 2" in gathering.reject(rank)
    first.close()  # a node that ended before all had joined may join again
    wait_until(lambda: 1 in gathering.rendezvous._missing())
    gathering.finish()


def test_hostile_clients_do_not_stop_the_rendezvous(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)
    gathering = Gathering(settings_of())
    silent = [socket.create_connection(gathering.settings.address) for _ in range(8)]
    noise = socket.create_connection(gathering.settings.address)
    noise.sendall(bytes(range(256)) * 4)
    greeting = encode(JoinRequest(node_rank=1, name="x", facts=FACTS))
    for kind, body in ((JOIN, b"\xc1"), (JOIN, b""), (JOIN, greeting[:-1]), (JOIN, b"\x91" * 900), (STATUS, greeting), (255, b"")):
        link = gathering.connect()
        link.send(kind, body)
        with pytest.raises(LinkError):
            link.receive(5)
    gathering.finish()
    assert "is not a node of this version of Stoker" in caplog.text and "sent a malformed message" in caplog.text
    for connection in (*silent, noise):
        connection.close()


def test_missing_nodes_are_named_with_the_reason(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)
    caplog.set_level(logging.INFO, "stoker")
    settings = settings_of(rendezvous_timeout_s=1.0)
    rendezvous = Rendezvous(settings, FACTS)
    caught: list[RankError] = []

    def gather() -> None:
        with pytest.raises(RankError) as error:
            rendezvous.gather()
        caught.append(error.value)

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    link = open_link(socket.create_connection(settings.address), settings.read_token())
    link.send(JOIN, encode(JoinRequest(node_rank=2, name="h2", facts=msgspec.structs.replace(FACTS, engine="def"))))
    thread.join(10)
    text = "nodes 1, 2 did not join (node 2 (h2, 127.0.0.1) is rejected: the engine is def there, and abc on node 0) within 1 s."
    assert text in str(caught[0])
    messages = [record.getMessage() for record in caplog.records]  # threads of other tests may log, too
    assert next(text for text in messages if settings.rendezvous in text) == f"waiting at {settings.rendezvous} for nodes 1, 2."


def test_a_node_reports_its_failed_rank_once() -> None:
    server, client = link_pair()
    node = RemoteNode(server, JoinRequest(node_rank=1, name="h1", facts=FACTS))
    client.send(STATUS, encode(NodeStatus(2, 7)))
    wait_until(lambda: node.status.released == 7)
    client.send(FAILED, encode(Failure("rank 0 on cpu was killed by SIGKILL.", "last words", is_cause=True)))
    wait_until(lambda: node.failure)
    client.close()
    node.close()
    assert node.failure is not None
    assert node.failure.startswith("node 1 (h1, 127.0.0.1): rank 0 on cpu was killed by SIGKILL. Its log is saved in ")
    log = Path(node.failure.partition("saved in ")[2])
    assert log.read_text() == "last words"
    log.unlink()
    log.parent.rmdir()


def test_the_rank_that_failed_first_is_reported() -> None:
    """The other ranks end with a status when a rank dies, and the report about it may arrive after theirs."""
    process = cast(FollowerProcess, None)
    killed, ended = (FailedRank(process, reason, is_cause) for reason, is_cause in (("was killed", True), ("ended with status 1", False)))
    lost, follows = (cast(RemoteNode, SimpleNamespace(failure="node 1", is_cause=is_cause)) for is_cause in (True, False))
    assert first_failure(ended, [], may_wait=True) is first_failure(None, [follows], may_wait=True) is None
    assert first_failure(ended, [follows], may_wait=False) is first_failure(ended, [], may_wait=False) is ended
    assert first_failure(ended, [follows, lost], may_wait=True) is first_failure(None, [lost], may_wait=True) is lost
    assert first_failure(killed, [lost], may_wait=True) is killed and first_failure(None, [follows], may_wait=False) is follows


def test_a_node_ends_with_the_reason_of_node_0() -> None:
    server, client = link_pair()
    reader = TcpReader(client, 16, 5.0, lambda: NodeStatus(0, 0))
    server.send(STOP, b"node 2 closed the connection.")
    with pytest.raises(StoppedError, match="node 2 closed the connection"):
        reader.receive(0.0)
    server.send(RECORD, bytes(6))
    with pytest.raises(LinkError, match="sent a record of 6 bytes"):
        reader.receive(0.0)
    server.send(RECORD, bytes(4 * 64))
    assert len(reader.receive(0.0)) == 64
    for end in (server, client):
        end.close()


def test_a_rejected_node_raises_the_reason() -> None:
    server, client = link_pair()
    node = Node(client, NodeSettings(num_nodes=2, node_rank=1, rendezvous="127.0.0.1:1"))
    server.send(REJECTED, b"node 1 is rejected: the engine is def there, and abc on node 0")
    with pytest.raises(ConfigError, match="the engine is def there, and abc on node 0"):
        node.join(JoinRequest(node_rank=1, name="h1", facts=FACTS))
    node.close()
    server.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 0}, "nnodes=0 is refused"),
        ({"num_nodes": 2}, "nnodes=2 requires a rendezvous"),
        ({"num_nodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "node_rank=2 is refused: nnodes is 2"),
        ({"num_nodes": 2, "rendezvous": "host"}, "rendezvous='host' is refused"),
        ({"num_nodes": 2, "rendezvous": "host:0"}, "rendezvous='host:0' is refused"),
        ({"num_nodes": 2, "rendezvous": "::1:29400"}, "rendezvous='::1:29400' is refused"),
        ({"num_nodes": 2, "rendezvous": "a:1", "rendezvous_timeout_s": 0.0}, "rendezvous_timeout_s=0.0 is refused"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NodeSettings(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_addresses_of_ipv6() -> None:
    assert NodeSettings(num_nodes=2, rendezvous="[fd00::1]:29400").address == ("fd00::1", 29400)


def test_the_secret_is_required_and_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = NodeSettings(num_nodes=2, rendezvous="a:1")
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert nodes.read_token() == msgspec.structs.replace(nodes, token_file=str(file)).read_token() != TOKEN.encode()
    problems = {"": "STOKER_CLUSTER_TOKEN is not set", "short": "STOKER_CLUSTER_TOKEN has 5 bytes, and a shared secret has 16"}
    for value, message in problems.items():
        monkeypatch.setenv("STOKER_CLUSTER_TOKEN", value)
        with pytest.raises(ConfigError) as caught:
            nodes.read_token()
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"cluster_token_file=.*missing cannot be read"):
        NodeSettings(num_nodes=2, rendezvous="a:1", token_file=str(tmp_path / "missing")).read_token()


@pytest.mark.parametrize(
    ("mapping", "num_nodes", "places", "kind"),
    [
        (Mapping(tensor_parallel=2, pipeline_parallel=2), 2, (1, 1, 0, 0), "pipeline across nodes, tensor within a node"),
        (Mapping(pipeline_parallel=3), 3, (1, 2, 0), "pipeline across nodes, tensor within a node"),
        (Mapping(tensor_parallel=4), 2, (0, 0, 1, 1), "tensor across nodes"),
        (Mapping(tensor_parallel=2, pipeline_parallel=2), 4, (2, 3, 0, 1), "tensor and pipeline across nodes"),
        (Mapping(tensor_parallel=2, pipeline_parallel=4), 2, (1, 1, 1, 1, 0, 0, 0, 0), "pipeline across nodes, tensor within a node"),
    ],
)
def test_the_leader_is_on_node_0(mapping: Mapping, num_nodes: int, places: tuple[int, ...], kind: str) -> None:
    found = place_ranks(mapping, num_nodes)
    lines = describe_placement(mapping, found, tuple(f"10.0.0.{node}" for node in found))
    assert found == places and lines[0] == f"{mapping.world_size} ranks on {num_nodes} nodes: {kind}"
    assert [line for line in lines if "(leader)" in line] == [line for line in lines if line.startswith("  node 0 (10.0.0.0)")]


def test_ranks_that_cannot_be_divided_are_rejected() -> None:
    for size, ranks in ((1, "1 rank (tensor 1 × pipeline 1)"), (4, "4 ranks (tensor 4 × pipeline 1)")):
        with pytest.raises(ConfigError) as caught:
            place_ranks(Mapping(tensor_parallel=size), 3)
        assert f"nnodes=3 is refused: the engine has {ranks}, which" in str(caught.value)
    assert "Use one of: 1, 2, 4" in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "node_rank", "local_rank", "expected"),
    [
        (None, 0, 0, {2: 0, 3: 1}),
        (None, 1, 0, {0: 0, 1: 1}),
        (None, 1, 1, {0: 2, 1: 3}),  # the second process of a host
        (None, 1, 3, {0: 0, 1: 1}),  # only the GPUs of the process are visible
        ((3, 2), 1, 0, {0: 3, 1: 2}),
        ((3, 2, 1, 0), 0, 0, {2: 1, 3: 0}),  # of all ranks
        (
            (0,),
            0,
            0,
            "4 ranks (tensor 2 × pipeline 2), 2 on each of 2 nodes, and devices=[0] names 1. Name one",
        ),
        ((0, 4), 0, 0, "devices=[0, 4], and this machine has 4"),
        ((1, 1), 0, 0, "Name 2 different devices of this machine"),
    ],
)
def test_gpus_of_a_node(
    devices: tuple[int, ...] | None, node_rank: int, local_rank: int, expected: dict[int, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    mapping = Mapping(tensor_parallel=2, pipeline_parallel=2)
    config = SimpleNamespace(mapping=mapping, target=SimpleNamespace(device="cuda"))
    engine: Any = SimpleNamespace(config=config, path="engine", world_size=4)
    nodes = NodeSettings(num_nodes=2, node_rank=node_rank, rendezvous="a:1", local_rank=local_rank)
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as caught:
            rank_devices(engine, RuntimeConfig(devices=devices), nodes)
        assert expected in str(caught.value)
    else:
        found = rank_devices(engine, RuntimeConfig(devices=devices), nodes)
        assert {rank: device.index for rank, device in found.items()} == expected
