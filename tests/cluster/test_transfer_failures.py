"""Transfers of KV cache blocks between engines of different numbers of ranks, and the death of either side in the middle of one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pairs import Pair, Side, request, run, with_tickets

from stoker.base import env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SECRET = "a shared secret of these tests"
_dice = random.Random(4)
PROMPT = [_dice.randrange(3, 300) for _ in range(150)]

# An executor in a process of its own, which stops when it reads or writes the second layer of a transfer.
PROCESS = """
import json, sys, threading
from stoker.runtime.transfer.pages import RankPages
from stoker.runtime.request import TokenRequest
import msgspec
from pairs import Side
engine, stopped = sys.argv[1:]
original = getattr(RankPages, stopped)
def stopping(self, layer, *args):
    if layer == 1:
        print("stopped", flush=True)
        threading.Event().wait()
    return original(self, layer, *args)
setattr(RankPages, stopped, stopping)
side = Side(engine)
print(side.executor.info.transfer.port, flush=True)
side.mailbox.submit([msgspec.json.decode(sys.stdin.readline(), type=TokenRequest)])
while True:
    side.turn()
"""


class OtherProcess:
    """An executor that another process runs. `stopped`: the method of RankPages in which it stops."""

    def __init__(self, engine: Path, stopped: str) -> None:
        variables = env.child_environment(STOKER_CLUSTER_TOKEN=SECRET, PYTHONPATH=":".join(sys.path), STOKER_LOG="error")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(engine), stopped], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def submit(self, message: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(message.decode() + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", SECRET)


@pytest.fixture
def other(engine: Callable[[str], Path]) -> Iterator[Callable[[str], OtherProcess]]:
    started: list[OtherProcess] = []

    def start(stopped: str) -> OtherProcess:
        started.append(OtherProcess(engine("one"), stopped))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.mark.parametrize(("prefill", "decode", "backend"), [("one", "tensor", "tcp"), ("tensor", "stages", "nixl")])
def test_ranks_may_differ(engine: Callable[[str], Path], prefill: str, decode: str, backend: str) -> None:
    """From one rank to two tensor-parallel ones, and from these to two stages."""
    if backend == "nixl":
        pytest.importorskip("nixl")
    both = Pair(engine(prefill), engine(decode), transfer_backend=backend)
    wanted = request(PROMPT)
    found = both.generate(wanted)
    assert (both.cached, both.decode.stats.num_failed_imports) == (144, 0)
    both.close()
    alone = Side(engine(decode), transfer_backend="tcp")
    assert found == alone.generate(wanted)
    alone.executor.close()


def test_the_side_that_computes_is_killed(engine: Callable[[str], Path], other: Callable[[str], OtherProcess]) -> None:
    """The other one computes the prompt itself, and holds no block afterwards."""
    prefill, decode = other("read"), Side(engine("one"))
    computed, decoded = with_tickets(request(PROMPT), "127.0.0.1", prefill.port)
    prefill.submit(msgspec.json.encode(computed))
    decode.mailbox.submit([decoded])
    run([decode], lambda: decode.stats.num_running_imports == 1)
    while decode.stats.imported_bytes == 0 and decode.executor.scheduler.kv_cache.pool.num_free == decode.stats.num_blocks:
        decode.turn()  # until blocks are allocated
    assert prefill.line() == "stopped"
    prefill.kill()
    run([decode], lambda: decode.has_answered(decoded))
    assert decode.stats.num_failed_imports == 1
    found = decode.answer(decoded)
    decode.check_idle()
    assert found == decode.generate(msgspec.structs.replace(request(PROMPT), cache_salt="alone"))
    decode.check_idle()
    decode.executor.close()


def test_the_side_that_reads_is_killed(engine: Callable[[str], Path], other: Callable[[str], OtherProcess]) -> None:
    """The other one releases the blocks at once: before the lease expires."""
    prefill, decode = Side(engine("one"), transfer_timeout_s=3600.0), other("write")
    address = prefill.executor.info.transfer
    assert address is not None
    computed, decoded = with_tickets(request(PROMPT), "127.0.0.1", address.port)
    prefill.mailbox.submit([computed])
    decode.submit(msgspec.json.encode(decoded))
    run([prefill], lambda: prefill.has_answered(computed))
    assert decode.line() == "stopped" and prefill.stats.num_held_exports == 1
    decode.kill()
    prefill.check_idle()
    assert (prefill.stats.num_exports, prefill.stats.num_failed_exports) == (0, 1)
    prefill.executor.close()
