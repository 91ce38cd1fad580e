"""Two executors in this process, of which one computes prompts for the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.types import FinishReason, SamplingParams
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.client import Cancel
from stoker.runtime.executor import Executor
from stoker.runtime.kv.prefix_index import pack
from stoker.runtime.load import load_executor
from stoker.runtime.request import SequenceOutput, TokenRequest
from stoker.runtime.transfer.ticket import make_tickets, read_ticket, transfer_key

_numbers = itertools.count()
LIMIT_S = 60.0
SECRET = "a shared secret of these tests"


class Side:
    """One executor, whose step loop the test runs."""

    def __init__(self, engine: Path, **settings: Any) -> None:
        chosen = {"kv_cache_tokens": 1024, "transfer": "127.0.0.1:0", "transfer_timeout_s": LIMIT_S, "transfer_backend": "tcp", **settings}
        config = RuntimeConfig(num_threads=1, **chosen)
        self.executor: Executor = load_executor(engine, config, SynchronousMailbox)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.first: dict[str, SequenceOutput] = {}

    @property
    def mailbox(self) -> SynchronousMailbox:
        assert isinstance(self.executor.mailbox, SynchronousMailbox)
        return self.executor.mailbox

    @property
    def stats(self) -> Any:
        return self.executor.snapshot()

    def turn(self) -> None:
        self.executor.turn(0.0)
        for output in self.mailbox.pop_outputs():
            self.first.setdefault(output.request_id, output)
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id, output.index] = output.finish_reason

    def cancel(self, request: TokenRequest) -> None:
        self.mailbox.messages.append(Cancel(request.request_id))

    def answer(self, request: TokenRequest) -> list[list[int]]:
        return [self.tokens[request.request_id, index] for index in range(request.params.n)]

    def generate(self, request: TokenRequest) -> list[list[int]]:
        """The answers of this executor alone."""
        self.mailbox.submit([request])
        run([self], lambda: self.has_answered(request))
        return self.answer(request)

    def has_answered(self, request: TokenRequest) -> bool:
        return all((request.request_id, index) in self.reasons for index in range(request.params.n))

    def blocks_of(self, token_ids: list[int]) -> list[int]:
        """The cached blocks of a prompt."""
        kv_cache, blocks = self.executor.scheduler.kv_cache, []
        assert kv_cache.index is not None
        parent: Any = ""
        for start in range(0, len(token_ids) - 15, 16):
            parent = kv_cache.index.find((parent, pack(token_ids[start : start + 16])))
            assert parent is not None
            blocks.append(parent.block)
        return blocks

    def check_idle(self) -> None:
        """No sequence, no transfer and no block is left."""
        run([self], lambda: not self.executor.is_busy)
        pool = self.executor.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks and not any(pool.refs)
        assert self.executor.scheduler.kv_cache.num_reserved == 0


class Pair:
    """`prefill` computes prompts, and `decode` continues."""

    def __init__(self, prefill: Path, decode: Path | None = None, prefill_tokens: int | None = None, **settings: Any) -> None:
        """`prefill_tokens`: the size of the cache of `prefill`, if it differs from that of `decode`."""
        self.prefill = Side(prefill, **(settings if prefill_tokens is None else {**settings, "kv_cache_tokens": prefill_tokens}))
        self.decode = Side(decode or prefill, **settings)

    @classmethod
    def of(cls, prefill: Side, decode: Side) -> Pair:
        """A pair of two executors that exist already."""
        pair = cls.__new__(cls)
        pair.prefill, pair.decode = prefill, decode
        return pair

    @property
    def sides(self) -> list[Side]:
        return [self.prefill, self.decode]

    def submit(self, request: TokenRequest, address: tuple[str, int] | None = None) -> tuple[TokenRequest, TokenRequest]:
        """Submit the request to both executors, with the tickets of one transfer, at `address` if it is given."""
        info = self.prefill.executor.info.transfer
        assert info is not None
        pair = with_tickets(request, *(address or (info.host, info.port)))
        for side, each in zip(self.sides, pair, strict=True):
            side.mailbox.submit([each])
        return pair

    def generate(self, request: TokenRequest) -> list[list[int]]:
        _, decoded = self.submit(request)
        run(self.sides, lambda: self.decode.has_answered(decoded))
        self.cached = self.decode.first[decoded.request_id].cached_tokens
        return self.decode.answer(decoded)

    def close(self) -> None:
        try:
            for side in self.sides:
                side.check_idle()
        finally:
            for side in self.sides:
                side.executor.close()


def with_tickets(request: TokenRequest, host: str, port: int) -> tuple[TokenRequest, TokenRequest]:
    """The request for the executor at this address, which computes the prompt, and that for the one that continues."""
    key = transfer_key()
    assert key is not None
    tickets = [read_ticket(text.encode(), key) for text in make_tickets(host, port, key)]
    only = msgspec.structs.replace(request.params, max_tokens=1, n=1)
    return (
        msgspec.structs.replace(request, request_id=f"p{next(_numbers)}", params=only, transfer=tickets[0]),
        msgspec.structs.replace(request, request_id=f"d{next(_numbers)}", transfer=tickets[1]),
    )


def request(prompt: list[int], num_new: int = 12, **params: Any) -> TokenRequest:
    settings = SamplingParams(**{"max_tokens": num_new, "ignore_eos": True, **params})
    return TokenRequest(request_id=f"r{next(_numbers)}", prompt_ids=prompt, params=settings)


def run(sides: list[Side], until: Callable[[], bool]) -> None:
    """Run the step loops until `until` returns True."""
    deadline = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < deadline, "the executors do not proceed"
        for side in sides:
            side.turn()
        time.sleep(0.0005)
