"""Reads recorded HTTP exchanges with the DJL server, and a service that returns the tokens of the recordings' stand-in engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from scripted_service import ScriptedService

from stoker.base.types import Delta, FinishReason, GenerationRequest, TokenLogprobs

FOLDER = Path(__file__).parent / "recorded"
TOKENS = ((101, "Hello", -0.5), (102, ",", -0.25), (103, " wörld", -1.0), (2, "", -0.125))
TEXTS = {**{token: text for token, text, _ in TOKENS}, 11: "hi", 12: " there"}
FAILED = "exception occurred during rolling batch inference"


class Recorded(NamedTuple):
    """One recorded request and its response, without transfer coding."""

    title: str
    method: str
    path: str
    request_body: bytes
    headers: dict[str, str]
    status: int
    content_type: str
    body: bytes


_ESCAPES = {"r": "\r", "n": "\n", "\\": "\\"}


def unescape(text: str) -> bytes:
    """The bytes of an escaped line of a recording."""
    return re.sub(r"\\(r|n|\\|x[0-9a-f]{2})", lambda m: _ESCAPES.get(m[1]) or chr(int(m[1][1:], 16)), text).encode("latin-1")


def read_recordings(name: str) -> list[Recorded]:
    """The HTTP/1.1 exchanges in the file that matches `name`."""
    text = next(FOLDER.glob(name)).read_text()
    blocks = re.split(r"^== ", text, flags=re.M)[1:]
    return [found for block in blocks if (found := _parse_recording(*block.split("\n", 1))) is not None]


def _parse_recording(title: str, block: str) -> Recorded | None:
    sent = b"".join(unescape(line[2:]) for line in block.split("\n") if line.startswith("> "))
    received = b"".join(unescape(line[2:]) for line in block.split("\n") if line.startswith("< "))
    first, headers, body = _message(sent)
    status, answer_headers, answer = _message(received)
    if not re.match(rb"[A-Z]+ \S+ HTTP", first) or not status:
        return None
    if answer_headers.get("transfer-encoding") == "chunked":
        answer = _join_chunks(answer)
    method, path, _ = first.decode().split(" ", 2)
    return Recorded(title, method, path, body, headers, int(status.split()[1]), answer_headers.get("content-type", ""), answer)


def _message(data: bytes) -> tuple[bytes, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    pairs = [line.decode("latin-1").split(": ", 1) for line in lines if b": " in line]
    return first, {name.lower(): value for name, value in pairs}, body


def _join_chunks(chunks: bytes) -> bytes:
    joined = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        joined, chunks = joined + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    return joined


class Formatted(NamedTuple):
    """A call of a formatter of release 0.26 or 0.27: its parameters, the number of steps, and the body that it returned."""

    title: str
    parameters: dict[str, Any]
    formatter: str
    steps: int
    body: bytes


def read_formatted(name: str) -> list[Formatted]:
    text = next(FOLDER.glob(name)).read_text()
    pattern = r"^== (.*?): parameters (\{.*\}), formatter (\w+)\n((?:  step .*\n)+)  body: (.*)$"
    return [
        Formatted(title, json.loads(parameters), formatter, steps.count("step"), unescape(body))
        for title, parameters, formatter, steps, body in re.findall(pattern, text, flags=re.M)
    ]


class RecordedService(ScriptedService):
    """Generates TOKENS for any prompt. A prompt that contains BOOM fails, after two tokens if it contains LATE."""

    end_ids = (2,)

    def __init__(self, num_tokens: int = 4) -> None:
        super().__init__(name="llm")
        self._num_tokens = num_tokens
        self._text = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._text = text
        return [11, 12]

    def token_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id].encode()

    def _plan(self, request: GenerationRequest, index: int) -> list[Delta]:
        tokens = TOKENS[: min(self._num_tokens, request.params.max_tokens)]
        top = request.params.logprobs or 0
        deltas = [
            Delta(index, text, [token], [TokenLogprobs(token, logprob, [(token, logprob), (token + 1, logprob - 1)][:top])])
            for token, text, logprob in tokens
        ]
        deltas[-1].finish_reason, deltas[-1].stop_reason = FinishReason.LENGTH, None
        if len(tokens) == 4:
            deltas[-1].finish_reason, deltas[-1].stop_reason = FinishReason.STOP, 2
        if "BOOM" in self._text:
            first = deltas[:2] if "LATE" in self._text else []
            deltas = [*first, Delta(index, finish_reason=FinishReason.ERROR, error=FAILED)]
        return deltas

    def _prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprobs | None]:
        return [TokenLogprobs(11, -2.0), None]
