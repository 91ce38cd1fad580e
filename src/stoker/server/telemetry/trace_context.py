"""W3C Trace Context: the headers `traceparent` and `tracestate` (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import random
import re

import msgspec

MAX_STATE_CHARS = 512  # of `tracestate`, as the specification requires; a longer one is dropped
SAMPLED = 1  # the only flag of version 00

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


class TraceContext(msgspec.Struct, frozen=True):
    """The position of one request in a trace. Ids are in hexadecimal digits."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits: the span of this server for the request
    parent_id: str = ""  # 16 digits: the span of the client; empty if the client sent none
    sampled: bool = False
    state: str = ""  # `tracestate` of the client

    @property
    def header(self) -> str:
        """The value of `traceparent` that names the span of this server."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def parse_parent(header: bytes, state: bytes | None = None) -> TraceContext | None:
    """The context of a request with these headers and a new span id. None for a `traceparent` that the specification calls invalid."""
    if len(header) > MAX_STATE_CHARS or (match := _PARENT.fullmatch(header)) is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest is not None) or not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return None
    return TraceContext(trace_id.decode(), new_span_id(), parent_id.decode(), bool(int(flags, 16) & SAMPLED), _state(state))


def new_trace(*, sampled: bool) -> TraceContext:
    """The context of a request without a `traceparent`."""
    return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id(), sampled=sampled)


def new_span_id() -> str:
    """A random id of a span, which is not zero."""
    return f"{random.getrandbits(64) or 1:016x}"


def _state(header: bytes | None) -> str:
    """The value of `tracestate`, or an empty text if it is absent, too long or not printable ASCII."""
    text = (header or b"").decode("latin-1").strip()
    return text if len(text) <= MAX_STATE_CHARS and text.isascii() and text.isprintable() else ""
