"""Transfers of KV cache blocks between engines of different numbers of ranks, and the death of either side in the middle of one."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pairs import Pair, Side, request, run, with_tickets

from stoker.base import env
from stoker.runtime.request import TokenRequest
from stoker.runtime.transfer.nixl_agent import NixlAgent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SECRET = "a shared secret of these tests"
BACKENDS = ["tcp", "nixl"]
_dice = random.Random(4)
PROMPT, NEXT_PROMPT = ([_dice.randrange(3, 300) for _ in range(150)] for _ in range(2))

# An executor in a process of its own. It stops in a call of a method of the transfers, and prints a line when it does.
PROCESS = """
import importlib, itertools, sys, threading
from stoker.runtime.request import TokenRequest
import msgspec
from pairs import Side
engine, backend, module, method, number = sys.argv[1:]
if module:
    owner = importlib.import_module("stoker.runtime.transfer." + module)
    *names, name = method.split(".")
    for each in names:
        owner = getattr(owner, each)
    original, calls = getattr(owner, name), itertools.count(1)
    def stopping(*args, **options):
        if next(calls) == int(number):
            print("> stopped", flush=True)
            threading.Event().wait()
        return original(*args, **options)
    setattr(owner, name, stopping)
side = Side(engine, transfer_backend=backend)
print(">", side.executor.info.transfer.port, flush=True)
side.mailbox.submit([msgspec.json.decode(sys.stdin.readline(), type=TokenRequest)])
while True:
    side.turn()
"""

Stop = tuple[str, str, int]  # module, method, number of the call
# The process that computes has sent or announced the first layer of a step of 128 tokens.
AFTER_A_LAYER: dict[str, Stop] = {"tcp": ("pages", "RankPages.read", 2), "nixl": ("progress", "StepProgress.wait", 2)}
# The process that reads has stored one layer of the step, or has started to copy all, and waits for a copy.
DURING_A_READ: dict[str, Stop] = {"tcp": ("pages", "RankPages.write", 2), "nixl": ("nixl_agent", "NixlAgent.state", 1)}


class OtherProcess:
    """An executor that another process runs. `stop`: where it stops; None if it does not."""

    def __init__(self, engine: Path, backend: str, stop: Stop | None) -> None:
        variables = env.child_environment(STOKER_CLUSTER_TOKEN=SECRET, PYTHONPATH=":".join(sys.path), STOKER_LOG="error")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(engine), backend, *map(str, stop or ("", "", 0))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        )  # fmt: skip
        self.port = int(self.line())

    def line(self) -> str:
        """The next line of PROCESS; NIXL prints others."""
        assert self.process.stdout is not None
        return next(line[2:].strip() for line in self.process.stdout if line.startswith("> "))

    def submit(self, message: TokenRequest) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message).decode() + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


Start = Callable[[str, Stop | None], OtherProcess]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", SECRET)


@pytest.fixture
def other(engine: Callable[[str], Path]) -> Iterator[Start]:
    started: list[OtherProcess] = []

    def start(backend: str, stop: Stop | None) -> OtherProcess:
        started.append(OtherProcess(engine("one"), backend, stop))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def needs(backend: str) -> None:
    """Skip the test without the package of a backend."""
    if backend == "nixl":
        pytest.importorskip("nixl")


@pytest.mark.parametrize(("prefill", "decode", "backend"), [("one", "tensor", "tcp"), ("tensor", "stages", "nixl")])
def test_ranks_may_differ(engine: Callable[[str], Path], prefill: str, decode: str, backend: str) -> None:
    """From one rank to two tensor-parallel ones, and from these to two stages."""
    needs(backend)
    both = Pair(engine(prefill), engine(decode), transfer_backend=backend)
    wanted = request(PROMPT)
    found = both.generate(wanted)
    assert (both.cached, both.decode.stats.num_failed_imports) == (144, 0)
    both.close()
    alone = Side(engine(decode), transfer_backend="tcp")
    assert found == alone.generate(wanted)
    alone.executor.close()


def start_import(prefill: OtherProcess, decode: Side) -> TokenRequest:
    """Submit a request to both sides, and run the one that reads until it has allocated blocks. Returns the request that it answers."""
    computed, decoded = with_tickets(request(PROMPT), "127.0.0.1", prefill.port)
    prefill.submit(computed)
    decode.mailbox.submit([decoded])
    pool = decode.executor.scheduler.kv_cache.pool
    run([decode], lambda: decode.stats.num_running_imports == 1 and pool.num_free < pool.num_blocks)
    return decoded


def check_reader(decode: Side, decoded: TokenRequest, prefill: OtherProcess, caplog: pytest.LogCaptureFixture) -> None:
    """The side that reads computes the prompt itself, says why, holds no block afterwards, and reads from another process."""
    run([decode], lambda: decode.has_answered(decoded))
    assert (decode.stats.num_imports, decode.stats.num_failed_imports) == (0, 1)
    assert decoded.transfer is not None
    failure = (
        f"the transfer {decoded.transfer.transfer_id} of 150 tokens failed, and the prompt is computed here: 127.0.0.1:{prefill.port} "
    )
    assert any(failure in message for message in caplog.messages)
    found = decode.answer(decoded)
    decode.check_idle()
    assert found == decode.generate(msgspec.structs.replace(request(PROMPT), cache_salt="alone"))
    decode.check_idle()


def check_replacement(prefill: Side, decode: Side) -> None:
    """Another prompt is transferred. The ends of both executors."""
    pair = Pair.of(prefill, decode)
    imported = decode.stats.num_imports
    found = pair.generate(request(NEXT_PROMPT))
    assert (pair.cached, decode.stats.num_imports) == (144, imported + 1)
    assert found == decode.generate(msgspec.structs.replace(request(NEXT_PROMPT), cache_salt="alone"))
    pair.close()


@pytest.mark.parametrize(("backend", "reader"), [("tcp", "one"), ("nixl", "one"), ("nixl", "tensor")])
def test_the_side_that_computes_is_killed(
    engine: Callable[[str], Path], other: Start, caplog: pytest.LogCaptureFixture, backend: str, reader: str
) -> None:
    """Between two layers of a step. The other one computes the prompt itself, and holds no block afterwards."""
    needs(backend)
    prefill, decode = other(backend, AFTER_A_LAYER[backend]), Side(engine(reader), transfer_backend=backend)
    decoded = start_import(prefill, decode)
    assert prefill.line() == "stopped"
    prefill.kill()
    check_reader(decode, decoded, prefill, caplog)
    check_replacement(Side(engine("one"), transfer_backend=backend), decode)


def test_the_side_that_computes_is_killed_during_a_copy_of_nixl(
    engine: Callable[[str], Path], other: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, a process that is stopped answers no read: the copy is in progress until the process is killed."""
    needs("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    prefill, decode = other("nixl", None), Side(engine("one"), transfer_backend="nixl")
    states: list[str] = []
    calls, start_read, state = itertools.count(1), NixlAgent.start_read, NixlAgent.state

    def stopping(self: NixlAgent, *arguments: Any) -> Any:
        if next(calls) == len(self.caches):  # all layers of the step were announced
            os.kill(prefill.process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, prefill.process.pid, os.WSTOPPED)  # until all of its threads have stopped
        return start_read(self, *arguments)

    def killing(self: NixlAgent, handle: Any) -> str:
        states.append(state(self, handle))
        if len(states) == 1:
            prefill.kill()
        return states[-1]

    with monkeypatch.context() as patch:
        patch.setattr(NixlAgent, "start_read", stopping)
        patch.setattr(NixlAgent, "state", killing)
        decoded = start_import(prefill, decode)
        run([decode], lambda: decode.stats.num_running_imports == 0)
    assert states[0] == "PROC" and "DONE" not in states
    check_reader(decode, decoded, prefill, caplog)
    check_replacement(Side(engine("one"), transfer_backend="nixl"), decode)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_side_that_reads_is_killed(engine: Callable[[str], Path], other: Start, backend: str) -> None:
    """The other one releases the blocks at once: before the lease expires."""
    needs(backend)
    prefill = Side(engine("one"), transfer_backend=backend, transfer_timeout_s=3600.0)
    decode = other(backend, DURING_A_READ[backend])
    address = prefill.executor.info.transfer
    assert address is not None
    computed, decoded = with_tickets(request(PROMPT), "127.0.0.1", address.port)
    prefill.mailbox.submit([computed])
    decode.submit(decoded)
    run([prefill], lambda: prefill.has_answered(computed))
    assert decode.line() == "stopped" and prefill.stats.num_held_exports == 1
    decode.kill()
    prefill.check_idle()
    assert (prefill.stats.num_exports, prefill.stats.num_failed_exports) == (0, 1)
    check_replacement(prefill, Side(engine("one"), transfer_backend=backend))
