"""Recorded exchanges with the Truss server, sent again over a socket; and a service that says what the recorded models said."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import NamedTuple

from lmi_recordings import unescape
from scripted_service import ScriptedService

from stoker.base.types import Delta, FinishReason, GenerationRequest

FOLDER = Path(__file__).parent / "recorded"


class Reply(NamedTuple):
    """One answer. `pieces` are its chunks as they were framed, or its whole body."""

    status: int
    headers: dict[str, str]
    pieces: list[bytes]


class Recorded(NamedTuple):
    title: str
    sent: bytes
    reply: Reply
    closed: bool  # by the server, after the answer


def read(name: str) -> list[Recorded]:
    """The exchanges of a file that begin with a request and have one answer."""
    text = next(FOLDER.glob(name)).read_text()
    found = [_exchange(*block.split("\n", 1)) for block in re.split(r"^== ", text, flags=re.M)[1:]]
    return [case for case in found if case.sent and case.reply.status]


def _exchange(title: str, block: str) -> Recorded:
    sent, got = ("".join(line[2:] + "" for line in block.split("\n") if line.startswith(mark)) for mark in ("> ", "< "))
    return Recorded(title, unescape(sent), parse(unescape(got)), "[closed by the server]" in block)


def parse(data: bytes) -> Reply:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    pieces = _chunks(body) if headers.get("transfer-encoding") == "chunked" else [body]
    return Reply(int(first.split(" ")[1]) if " " in first else 0, headers, pieces)


def _chunks(body: bytes) -> list[bytes]:
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            break
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return pieces


async def send(port: int, data: bytes) -> Reply:
    """The answer to bytes on a connection of their own, read until it is whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = b""
    async with asyncio.timeout(10):
        while not _whole(got, data) and (more := await reader.read(65536)):
            got += more
    writer.close()
    return parse(got)


def _whole(got: bytes, sent: bytes) -> bool:
    head, end, body = got.partition(b"\r\n\r\n")
    if not end or head.startswith(b"HTTP/1.1 100"):
        return False
    if b"transfer-encoding: chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return length is not None and (sent.startswith(b"HEAD") or len(body) >= int(length[1]))


class StandIn(ScriptedService):
    """Says the given pieces of text, one a token, whatever is asked."""

    def __init__(self, *pieces: str) -> None:
        super().__init__(name="model")
        self._pieces = pieces or ("Hello", ",", " wörld", "", "\n", "end")
        self.fault: Exception | None = None  # raised in place of the first delta

    def _plan(self, request: GenerationRequest, index: int) -> list[Delta]:
        if self.fault is not None:
            raise self.fault
        deltas = [Delta(index, text, [7]) for text in self._pieces]
        deltas[-1].finish_reason = FinishReason.STOP
        if self.fails_after is not None:
            deltas = [*deltas[: self.fails_after], Delta(index, finish_reason=FinishReason.ERROR, error="the step failed.")]
        return deltas
