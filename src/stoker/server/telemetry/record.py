"""The record of one request of a client: who sent it, what it generated, and when. The access log and traces are written from it.

The handler of a transport (HTTP or gRPC) opens a record, and `CURRENT` holds it in the tasks that the handler starts. The generation
service adds each generation of the request, of which there may be several, for example one per prompt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from stoker.base.types import PrefillChunk, SamplingParams, Timings, Usage
from stoker.server.telemetry.trace_context import TraceContext

MAX_ID_CHARS = 128
CURRENT: ContextVar[RequestRecord | None] = ContextVar("request", default=None)


class Generation(msgspec.Struct):
    """One generation of a request. Times are of time.monotonic()."""

    model: str
    started: float
    ended: float
    usage: Usage
    finish_reason: str = ""
    first: float | None = None  # when the first token arrived; None without tokens
    timings: Timings | None = None  # None if the generation did not end by itself
    params: SamplingParams | None = None
    chunks: list[PrefillChunk] = []  # of the first sequence, if the request is sampled
    prompt: str | list[int] | None = None  # the contents, if they are logged
    texts: list[str] = []  # by sequence


class RequestRecord:
    """One request. `key` is the name of the API key that it was sent with, empty without one."""

    __slots__ = (
        "client",
        "contents",
        "error",
        "generations",
        "key",
        "measured",
        "method",
        "on_close",
        "protocol",
        "request_id",
        "returns_timings",
        "route",
        "started",
        "status",
        "timings",
        "trace",
    )

    def __init__(self, request_id: str, *, client: str, protocol: str, method: str, route: str) -> None:
        self.request_id = request_id
        self.client = client  # address
        self.protocol = protocol
        self.method = method
        self.route = route  # the path of the endpoint, with names in place of its parameters
        self.trace: TraceContext | None = None  # None: the request belongs to no trace
        self.measured = False  # whether the times of prefill chunks and of detokenization are measured
        self.contents = False  # whether generations retain prompt and text
        self.returns_timings = False  # whether the client requested the header Server-Timing, and times in the usage
        self.timings: Timings | None = None  # of the generation that ended last
        self.key = ""
        self.status = 0
        self.error = ""  # the code of the error that the request was refused with
        self.generations: list[Generation] = []
        self.on_close: list[Callable[[], None]] = []  # called when the request has ended
        self.started = time.monotonic()

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request to its first token; None without one."""
        first = [generation.first for generation in self.generations if generation.first is not None]
        return min(first) - self.started if first else None

    def usage(self) -> Usage:
        """The tokens of all generations together."""
        if len(self.generations) == 1:
            return self.generations[0].usage
        total = Usage()
        for generation in self.generations:
            total.prompt_tokens += generation.usage.prompt_tokens
            total.completion_tokens += generation.usage.completion_tokens
            total.cached_tokens += generation.usage.cached_tokens
        return total

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """`traceparent` if the request belongs to a trace, and `server-timing` if the client requested it and a generation has ended."""
        headers = [] if self.trace is None else [(b"traceparent", self.trace.header.encode())]
        if self.returns_timings and (timing := self.server_timing()):
            headers.append((b"server-timing", timing.encode()))
        return headers

    def usage_timings(self) -> dict[str, float]:
        """Milliseconds of each phase of the generation that ended last; empty unless the client requested them."""
        if not self.returns_timings or self.timings is None:
            return {}
        return {name: round(seconds * 1e3, 3) for name, seconds in self.timings.phases().items()}

    def server_timing(self) -> str:
        """The value of the header Server-Timing: milliseconds of each phase of the first generation; empty if none has ended."""
        timings = self.generations[0].timings if self.generations else None
        if timings is None:
            return ""
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in timings.phases().items())


def request_id_of(header: bytes | None) -> str:
    """The client's id of a request if it is short printable ASCII, otherwise a new random id."""
    text = header.decode("latin-1") if header is not None else ""
    return text if 0 < len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable() else f"{random.getrandbits(128):032x}"
