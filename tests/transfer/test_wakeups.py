"""A step loop that waits for other threads is woken by them: here its waits have practically no time limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pairs import LIMIT_S, request, with_tickets
from test_transfers import prompt

from stoker.base.config import RuntimeConfig
from stoker.base.types import Guide
from stoker.runtime import executor as executor_module
from stoker.runtime.client import Shutdown
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import TokenRequest
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox


@pytest.fixture(autouse=True)
def endless_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_IDLE_POLL_S", "_PREPARING_POLL_S"):
        monkeypatch.setattr(executor_module, name, 3600.0)


@contextmanager
def running(engine: Path, **settings: Any) -> Iterator[Executor]:
    """An executor whose loop runs in a thread."""
    executor = load_executor(engine, RuntimeConfig(num_threads=1, kv_cache_tokens=1024, **settings), InProcessMailbox)
    thread = threading.Thread(target=executor.run, daemon=True)
    thread.start()
    try:
        yield executor
    finally:
        mailbox_of(executor).put(Shutdown(drain=False))
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def mailbox_of(executor: Executor) -> InProcessMailbox:
    assert isinstance(executor.mailbox, InProcessMailbox)
    return executor.mailbox


def generate(*pairs: tuple[Executor, TokenRequest]) -> list[list[int]]:
    """The tokens of each request, in the order of the pairs."""

    async def answer(executor: Executor, request: TokenRequest) -> list[int]:
        client = InProcessClient(mailbox_of(executor))
        tokens = [token async for outputs in client.generate(request) for output in outputs for token in output.token_ids]
        await client.close()
        return tokens

    async def answers() -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*(answer(*pair) for pair in pairs)), LIMIT_S)

    return asyncio.run(answers())


def test_a_transfer_wakes_both_executors(tiny_engine: Path) -> None:
    settings = {"transfer": "127.0.0.1:0", "transfer_backend": "tcp", "transfer_timeout_s": LIMIT_S}
    with running(tiny_engine, **settings) as prefill, running(tiny_engine, **settings) as decode:
        address = prefill.info.transfer
        assert address is not None
        wanted = request(prompt(90, 100))
        computed, decoded = with_tickets(wanted, address.host, address.port)
        _, tokens = generate((prefill, computed), (decode, decoded))
        assert (decode.snapshot().num_imports, decode.snapshot().num_failed_imports) == (1, 0)
        deadline = time.monotonic() + LIMIT_S
        while prefill.snapshot().num_held_exports:
            assert time.monotonic() < deadline, "the blocks that were read are not released"
        assert generate((decode, msgspec.structs.replace(wanted, cache_salt="alone"))) == [tokens]


def test_a_compiled_grammar_wakes_the_executor(tiny_engine: Path) -> None:
    pytest.importorskip("xgrammar")
    with running(tiny_engine) as executor:
        guided = request(prompt(91, 20), guide=Guide("regex", "[ab]{3}"), ignore_eos=False)
        (tokens,) = generate((executor, msgspec.structs.replace(guided, end_ids=(2,))))
        assert 3 <= len(tokens) <= 4
