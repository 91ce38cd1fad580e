"""The load: clients in a closed loop, each with one request in flight, and the judgment of each answer."""

from __future__ import annotations

import asyncio
import importlib.util
from random import Random
from typing import Any

import httptools
from chaos.ledger import Ledger
from chaos.requests_by_protocol import HTTP_KINDS, Case, FormatError, Kind, Refused
from chaos.wire import POLITE, Connection, Manners, Response

DEADLINE_S = 90.0  # longer than every fault: a request without an answer after it is lost
RPC_KINDS = {"grpc": False, "grpc stream": True}
RETRY_S = 0.1  # pause of a client after a refusal
REUSED = 0.5  # fraction of requests after which a client keeps its connection
UNANSWERED = "the connection ended"

Key = tuple[str, int]  # kind and case


class Target:
    """Where requests go, and what the quiet server answers."""

    def __init__(self, host: str, http_port: int, grpc_port: int | None, cases: list[Case]) -> None:
        self.host, self.http_port, self.grpc_port = host, http_port, grpc_port
        self.cases = cases
        self.answers: dict[Key, str] = {}
        self.unstable: set[Key] = set()  # whose quiet answer depends on the batch; these are not sent in the chaos run

    @property
    def kinds(self) -> list[str]:
        """The kinds of requests that the server and this machine can handle."""
        http = [kind.name for kind in HTTP_KINDS if kind.name != "guided" or importlib.util.find_spec("xgrammar")]
        return [*http, *(RPC_KINDS if self.grpc_port is not None else ())]

    def keys(self) -> list[Key]:
        """All requests that can be sent."""
        seeded = {kind.name for kind in HTTP_KINDS if kind.seeded} | set(RPC_KINDS)
        return [(kind, case.number) for kind in self.kinds for case in self.cases if case.seed is None or kind in seeded]


class Client:
    """One client. Its requests are judged by the answers of `target`, and accounted for in `ledger`."""

    def __init__(self, target: Target, ledger: Ledger) -> None:
        self._target, self._ledger = target, ledger
        self._connection = Connection(target.host, target.http_port)
        self._channel: Any = None
        self._by_name = {kind.name: kind for kind in HTTP_KINDS}

    async def send(self, key: Key, manners: Manners = POLITE) -> tuple[str, str]:
        """Send a request; returns (outcome, the text or the detail) without an entry in the ledger."""
        case = self._target.cases[key[1]]
        if key[0] in RPC_KINDS:
            return await self._infer(case, RPC_KINDS[key[0]], manners)
        kind = self._by_name[key[0]]
        response = await self._connection.post(kind.path, kind.body(case), manners, DEADLINE_S)
        self._span = response.started_s, response.ended_s
        return judge(kind, response)

    async def account(self, key: Key, manners: Manners) -> str:
        """Send a request, and account for it. Returns its outcome before the account."""
        outcome, text = await self.send(key, manners)
        quiet = self._target.answers[key]
        if (outcome == "answered" and text != quiet) or (outcome == "left" and not quiet.startswith(text)):
            detail = f"case {key[1]}: {text[-300:]!r} instead of {quiet[-300:]!r}"
            self._ledger.add(key[0], "wrong", self._span, detail)
        else:
            self._ledger.add(key[0], "same" if outcome == "answered" else outcome, self._span, text)
        return outcome

    async def run(self, keys: list[Key], random: Random, stop: asyncio.Event, *, rude: bool) -> None:
        """Send random requests until `stop`. With `rude`, some clients vanish, do not read, or send slowly."""
        while not stop.is_set():
            outcome = await self.account(random.choice(keys), manners(random) if rude else POLITE)
            if outcome == "refused":
                await asyncio.sleep(RETRY_S)
            if random.random() > REUSED:
                self._connection.close()
        await self.close()

    async def close(self) -> None:
        self._connection.close()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _infer(self, case: Case, stream: bool, manners: Manners) -> tuple[str, str]:
        from chaos.rpc import Channel

        if self._channel is None:
            assert self._target.grpc_port is not None
            self._channel = Channel(self._target.host, self._target.grpc_port)
        answer = await self._channel.infer(case, stream, manners, DEADLINE_S)
        self._span = answer.started_s, answer.ended_s
        if answer.ended == "complete":
            return "answered", answer.text
        if answer.ended == "cut":  # a new channel, because gRPC waits before it connects again
            await self._channel.close()
            self._channel = None
        return {"late": "lost"}.get(answer.ended, answer.ended), answer.text if answer.ended == "left" else answer.detail


def manners(random: Random) -> Manners:
    """How the next client behaves: four of five wait for their answer and read it."""
    match random.randrange(20):
        case 0 | 1:
            return Manners(leave_s=random.uniform(0.0, 0.3), resets=random.random() < 0.5)
        case 2:
            return Manners(pause_s=random.uniform(0.2, 3.0))
        case 3:
            return Manners(trickles=True)
    return POLITE


def judge(kind: Kind, response: Response) -> tuple[str, str]:
    """(answered, refused, left, cut, wrong or lost; the text, the reason or what is wrong)."""
    if response.ended == "late":
        return "lost", f"no end after {DEADLINE_S:.0f} s; status {response.status}, {len(response.body)} bytes"
    try:
        if response.status not in (0, 200):
            if response.ended != "complete":
                return response.ended, f"{UNANSWERED} in an error response"
            return "refused", f"{response.status} {kind.error(response.body)}"
        if response.ended == "cut":
            return "cut", f"{UNANSWERED}: {response.detail}, status {response.status}, {len(response.body)} bytes"
        if response.ended == "left" and (" stream" not in kind.name and "_stream" not in kind.name):
            return "left", ""
        text, is_complete = kind.read(response.body)
    except Refused as error:
        return "refused", f"in the stream: {error}"
    except (FormatError, ValueError, KeyError, IndexError, TypeError, httptools.HttpParserError) as error:
        return "wrong", f"{type(error).__name__}: {error}; status {response.status}: {response.body[-300:]!r}"
    if response.ended == "left":
        return "left", text
    return ("answered", text) if is_complete else ("wrong", f"a stream without its end: {response.body[-300:]!r}")
