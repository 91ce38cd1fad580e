"""Reads recorded HTTP exchanges with the Truss server, sends them over a socket, and a service with the recorded models' output."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import NamedTuple

from lmi_recordings import unescape
from scripted_service import ScriptedService

from stoker.base.types import Delta, FinishReason, GenerationRequest

FOLDER = Path(__file__).parent / "recorded"


class RecordedResponse(NamedTuple):
    """One HTTP response. `chunks` are those of the chunked transfer coding, or the whole body."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes]


class Recorded(NamedTuple):
    """One recorded exchange."""

    title: str
    request: bytes
    response: RecordedResponse
    closed: bool  # whether the server closed the connection after the response


def read_recordings(name: str) -> list[Recorded]:
    """The exchanges in the file that matches `name`, as far as they start with a request and have one response."""
    text = next(FOLDER.glob(name)).read_text()
    found = [_parse_recording(*block.split("\n", 1)) for block in re.split(r"^== ", text, flags=re.M)[1:]]
    return [case for case in found if case.request and case.response.status]


def _parse_recording(title: str, block: str) -> Recorded:
    request, response = ("".join(line[2:] for line in block.split("\n") if line.startswith(mark)) for mark in ("> ", "< "))
    return Recorded(title, unescape(request), parse_response(unescape(response)), "[closed by the server]" in block)


def parse_response(data: bytes) -> RecordedResponse:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    chunks = _chunks(body) if headers.get("transfer-encoding") == "chunked" else [body]
    return RecordedResponse(int(first.split(" ")[1]) if " " in first else 0, headers, chunks)


def _chunks(body: bytes) -> list[bytes]:
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            break
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return chunks


async def send(port: int, data: bytes) -> RecordedResponse:
    """The response to `data`, which is sent on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    received = b""
    async with asyncio.timeout(10):
        while not _is_complete(received, data) and (more := await reader.read(65536)):
            received += more
    writer.close()
    return parse_response(received)


def _is_complete(received: bytes, request: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    if not end or head.startswith(b"HTTP/1.1 100"):
        return False
    if b"transfer-encoding: chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return length is not None and (request.startswith(b"HEAD") or len(body) >= int(length[1]))


class TokenTextService(ScriptedService):
    """Generates the given texts, one per token, for any prompt."""

    def __init__(self, *texts: str) -> None:
        super().__init__(name="model")
        self._texts = texts or ("Hello", ",", " wörld", "", "\n", "end")
        self.fault: Exception | None = None  # raised instead of the first delta

    def _plan(self, request: GenerationRequest, index: int) -> list[Delta]:
        if self.fault is not None:
            raise self.fault
        deltas = [Delta(index, text, [7]) for text in self._texts]
        deltas[-1].finish_reason = FinishReason.STOP
        if self.fails_after is not None:
            deltas = [*deltas[: self.fails_after], Delta(index, finish_reason=FinishReason.ERROR, error="the step failed.")]
        return deltas
