"""Tickets, connections and messages from outside: what is forged, malformed or out of range is refused, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from pairs import SECRET, Pair, Side, request, run
from test_transfers import BYTES_PER_TOKEN, prompt

from stoker.base.config import Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, DependencyError, RequestError
from stoker.cli.prepare_server import read_deployment
from stoker.core.model_config import ModelConfig
from stoker.engine.reader import Engine
from stoker.router.core.policy import Decision, Route
from stoker.router.core.prefix import PromptPrefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Router
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.transfer import rank_server
from stoker.runtime.transfer.address import TransferAddress
from stoker.runtime.transfer.layout import EngineLayout, LayerLayout, RankLayout, local_layers, plan_reads
from stoker.runtime.transfer.messages import DONE, FAILED, LAYER, NEXT, OPEN, READ, Next, Open, Read, connect
from stoker.runtime.transfer.progress import StepProgress
from stoker.runtime.transfer.rank_server import RankServer, listen
from stoker.runtime.transfer.ticket import Ticket, make_tickets, read_ticket, sign, transfer_key
from stoker.runtime.transfer.transfers import check_transfers
from stoker.runtime.worker_group.hosts.link import LinkError
from stoker.server.settings import ServerSettings

KEY = b"k" * 32


def test_tickets_are_read_as_they_were_made() -> None:
    export, imported = (read_ticket(text.encode(), KEY) for text in make_tickets("10.0.0.5", 5600, KEY))
    assert (export.purpose, imported.purpose, export.host, export.port) == ("export", "import", "10.0.0.5", 5600)
    assert export.transfer_id == imported.transfer_id != read_ticket(make_tickets("h", 1, KEY)[0].encode(), KEY).transfer_id


GOOD = Ticket("import", "0" * 32, "10.0.0.5", 5600, int(time.time()) + 60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no valid signature"),
        (b"x" * 5000, "no valid signature"),
        (b"\xff.\xfe", "no valid signature"),
        (sign(GOOD, b"another key").encode(), "no valid signature"),
        (sign(GOOD, KEY).encode()[:-1], "no valid signature"),
        (sign(msgspec.structs.replace(GOOD, expires_s=1), KEY).encode(), "has expired"),
        (sign(msgspec.structs.replace(GOOD, port=70000), KEY).encode(), "malformed"),
        (sign(msgspec.structs.replace(GOOD, host="a b"), KEY).encode(), "malformed"),
        (sign(msgspec.structs.replace(GOOD, transfer_id="../x"), KEY).encode(), "malformed"),
        (sign(msgspec.structs.replace(GOOD, purpose="other"), KEY).encode(), "malformed"),  # type: ignore[arg-type]
    ],
)
def test_other_tickets_are_refused(text: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_ticket(text, KEY)


def test_no_ticket_is_valid_without_a_secret() -> None:
    with pytest.raises(RequestError, match="no valid signature"):
        read_ticket(sign(GOOD, KEY).encode(), None)


@pytest.fixture(scope="module")
def side(tiny_engine: Path) -> Iterator[Side]:
    """An executor that answers hostile messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CLUSTER_TOKEN", SECRET)
        made = Side(tiny_engine, transfer_timeout_s=0.5)
    yield made
    made.check_idle()
    made.executor.close()


def address_of(side: Side) -> tuple[str, int]:
    info = side.executor.info.transfer
    assert info is not None
    return info.host, info.port


BLOCKS = {"step": 0, "first_block": 0, "blocks": [0], "layers": [(0, [0])], "is_raw": True}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (READ, b"\xc1"),
        (READ, msgspec.msgpack.encode([0, 0, [1 << 40], [], True])),
        (READ, msgspec.msgpack.encode(Read(**BLOCKS | {"blocks": [64]}))),
        (READ, msgspec.msgpack.encode(Read(**BLOCKS | {"blocks": []}))),
        (READ, msgspec.msgpack.encode(Read(**BLOCKS | {"layers": [(3, [0])]}))),
        (READ, msgspec.msgpack.encode(Read(**BLOCKS | {"layers": [(0, [2])]}))),
        (READ, msgspec.msgpack.encode(Read(**BLOCKS | {"step": 1 << 30}))),  # a step that never comes
        (NEXT, msgspec.msgpack.encode(Next(0))),  # without an open transfer
        (DONE, b""),
        (99, b""),
        (OPEN, msgspec.msgpack.encode(Open("x" * 65))),
    ],
)
def test_hostile_messages_end_their_connection_only(side: Side, kind: int, body: bytes) -> None:
    key = transfer_key()
    assert key is not None
    link = connect(*address_of(side), key, 5.0)
    link.send(kind, body)
    assert link.receive(20.0)[0] == FAILED
    link.close()
    link = connect(*address_of(side), key, 5.0)
    link.send(READ, msgspec.msgpack.encode(Read(**BLOCKS)))
    kind, data = link.receive(20.0)
    assert kind == LAYER and len(data) == 2 * 16 * 8 * 4
    link.close()


def test_connections_without_the_secret_are_refused(side: Side) -> None:
    with pytest.raises(LinkError):
        connect(*address_of(side), b"another key", 5.0)
    with socket.create_connection(address_of(side)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        connection.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass


@pytest.fixture
def server() -> Iterator[RankServer]:
    made = RankServer(listen("127.0.0.1", 0), KEY)
    yield made
    made.close()


def answers(server: RankServer) -> bool:
    """Whether the server answers a message, here one that it refuses."""
    try:
        link = connect(*server.address, KEY, 5.0)
    except LinkError:
        return False
    link.send(99)
    kind, _ = link.receive(20.0)
    link.close()
    return kind == FAILED


def test_connections_are_accepted_after_errors_of_the_system(server: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "aborted")]
    accept, start = server._listener.accept, threading.Thread.start

    def failing_accept() -> object:
        if errors:
            raise errors.pop()
        return accept()

    monkeypatch.setattr(
        server, "_listener", SimpleNamespace(accept=failing_accept, shutdown=server._listener.shutdown, close=server._listener.close)
    )
    server.start(None, None, torch.float32)  # type: ignore[arg-type]
    assert answers(server) and not errors
    failures = [RuntimeError("can't start new thread")]

    def failing_start(thread: threading.Thread) -> None:
        if thread.name == "kv transfer" and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing_start)
    assert not answers(server) and not failures and answers(server)


def test_connections_without_a_handshake_count(server: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "MAX_LINKS", 2)
    server.start(None, None, torch.float32)  # type: ignore[arg-type]
    with socket.create_connection(server.address) as one, socket.create_connection(server.address) as other:
        assert one.recv(1) and other.recv(1)  # the greeting
        assert not answers(server)
    deadline = time.monotonic() + 20
    while not answers(server):
        assert time.monotonic() < deadline
    assert answers(server)


def test_blocks_are_read_while_the_prompt_is_computed(tiny_engine: Path, pair: type[Pair]) -> None:
    """The first chunk of a prompt of two chunks arrives before the second one is computed."""
    both = pair(tiny_engine)
    _, decoded = both.submit(request(prompt(30, 170)))
    both.prefill.turn()
    assert both.prefill.stats.num_prefill_tokens == 128
    transfers = both.decode.executor._transfers
    assert transfers is not None
    run([both.decode], lambda: any(each.num_bytes == 128 * BYTES_PER_TOKEN for each in transfers.imports._imports))
    run(both.sides, lambda: both.decode.has_answered(decoded))
    assert both.decode.stats.imported_bytes == 160 * BYTES_PER_TOKEN


def test_a_layer_can_be_read_before_the_next_one_is_computed() -> None:
    progress = StepProgress(2, torch.device("cpu"))
    progress.begin_step()
    assert not progress.wait(1, 0, 0.0)
    progress.end_layer()
    assert progress.wait(1, 0, 0.0) and not progress.wait(1, 1, 0.0) and not progress.wait(2, 0, 0.0)
    progress.end_step()
    progress.begin_step()
    assert progress.wait(1, 1, 0.0) and progress.wait(0, 1, 0.0) and not progress.wait(2, 0, 0.0)


@pytest.mark.parametrize(("own", "other"), [((1, 1), (4, 1)), ((4, 1), (1, 2)), ((2, 3), (3, 1)), ((8, 1), (2, 1))])
def test_every_head_of_every_layer_is_read_once(tiny_engine: Path, own: tuple[int, int], other: tuple[int, int]) -> None:
    """(tensor parallel, pipeline parallel) of both sides; there are two heads, so that ranks share or fill them."""
    model = Engine.open(tiny_engine).config.model
    source = EngineLayout(
        checkpoint="", tokens_per_block=16, num_layers=3, dtype="float32", plain_dtype="float32", ranks=ranks(model, other)
    )
    for rank in ranks(model, own):
        plan = plan_reads(rank, "float32", source)
        assert plan.is_raw and not plan_reads(rank, "bfloat16", source).is_raw
        found = {
            (rank.first_layer + read.own_layer, place): (source.ranks[number].first_layer + read.layer, head, number)
            for number, reads in plan.reads.items()
            for read in reads
            for place, head in zip(read.own_heads, read.heads, strict=True)
        }
        for i, layer in enumerate(rank.layers):
            for place, head in enumerate(layer.heads):
                if head < 0:
                    assert (rank.first_layer + i, place) not in found
                    continue
                source_layer, source_head, number = found[rank.first_layer + i, place]
                held = source.ranks[number]
                assert source_layer == rank.first_layer + i
                assert held.layers[source_layer - held.first_layer].heads[source_head] == head


def ranks(model: ModelConfig, parallel: tuple[int, int]) -> list[RankLayout]:
    mapping = Mapping(tensor_parallel=parallel[0], pipeline_parallel=parallel[1])
    layouts = []
    for rank in range(mapping.world_size):
        first, layers = local_layers(model, mapping, rank)
        layouts.append(RankLayout(host="", port=1, first_layer=first, layers=[LayerLayout(*layer, []) for layer in layers]))
    return layouts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"role": "decode"}, "role=decode has no effect without transfer"),
        ({"transfer": "127.0.0.1:0", "role": "other"}, "role='other' is refused"),
        ({"transfer": "127.0.0.1:0", "transfer_timeout_s": 0.0}, "transfer_timeout_s=0.0 is refused"),
        ({"transfer": "127.0.0.1:0", "prefix_reuse": False}, "transfer needs prefix_reuse"),
        ({"transfer": "127.0.0.1:0", "speculate": "/engines/draft"}, "the cache of the drafter"),
        ({"transfer": "127.0.0.1:0", "transfer_backend": "rdma"}, "transfer_backend='rdma' is refused"),
        ({"transfer": "::1:80"}, "Write HOST:PORT"),
        ({"transfer": "host:99999"}, "Write HOST:PORT"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_transfers(RuntimeConfig(**settings), False, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("token", "state"), [("", "is not set"), ("short", "has fewer than 16 bytes")])
def test_a_server_without_the_secret_does_not_start(token: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", token)
    with pytest.raises(ConfigError, match=f"transfer requires a shared secret, and STOKER_CLUSTER_TOKEN {state}"):
        check_transfers(RuntimeConfig(transfer="127.0.0.1:0"), False, 1)


def test_a_backend_that_is_not_installed_is_refused_before_anything_is_loaded(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.runtime.transfer.nixl_library.has_nixl", lambda: False)
    runtime = RuntimeConfig(transfer="127.0.0.1:0", transfer_backend="nixl")
    message = "transfer_backend=nixl needs the package nixl, which is not installed. Run: pip install 'stoker[nixl]'."
    for check in (
        lambda: read_deployment(tiny_engine, ServerSettings(), runtime),
        lambda: check_transfers(runtime, False, 1),
    ):
        with pytest.raises(DependencyError) as caught:
            check()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tokens", "cached", "load", "roles", "chosen"),
    [
        (600, 0, 0, ("decode", "prefill"), "1"),
        (500, 0, 0, ("decode", "prefill"), None),  # too short
        (1000, 600, 0, ("decode", "prefill"), None),  # most of it is cached
        (600, 0, 70000, ("decode", "prefill"), None),  # too many tokens wait there
        (600, 0, 0, ("both", "both"), "1"),
        (600, 0, 9000, ("both", "both"), None),  # the other one has more load
        (600, 0, 0, ("decode", "decode"), None),
        (600, 0, 0, ("decode", ""), None),
        (600, 0, 0, ("", "prefill"), None),
    ],
)
def test_the_router_chooses_who_computes_a_prompt(tokens: int, cached: int, load: int, roles: tuple[str, str], chosen: str | None) -> None:
    router = Router(RoutingSettings(), lambda: 0.0)
    for i, role in enumerate(roles):
        replica = router.fleet.add(str(i))
        router.fleet.set_transfer(replica, TransferAddress(role, "h", 1) if role else None)
        router.fleet.set_health(replica, ReplicaState.READY, 0.0)
    target, other = router.fleet
    other.prefill_tokens = load
    router.fleet.refresh(other, 0.0)
    route = Route(prefix=PromptPrefix((), 16, tokens, False))
    router.begin(route, Decision(target, cached))
    found = router.choose_prefill(route, Decision(target, cached))
    assert (found.replica.name if found is not None else None) == chosen


def test_prefill_replicas_answer_only_if_there_are_no_others() -> None:
    router = Router(RoutingSettings(), lambda: 0.0)
    for name, role in (("p", "prefill"), ("d", "decode")):
        replica = router.fleet.add(name)
        router.fleet.set_transfer(replica, TransferAddress(role, "h", 1))
        router.fleet.set_health(replica, ReplicaState.READY, 0.0)
    decision = router.choose(Route())
    assert decision is not None and decision.replica.name == "d"
    router.fleet.set_health(decision.replica, ReplicaState.UNREACHABLE, 0.0)
    decision = router.choose(Route())
    assert decision is not None and decision.replica.name == "p"
    router.remove(decision.replica)
    assert router.fleet.prefill_only == router.fleet.exporting == 0
