"""The access log: one line per request, with the logger `stoker.access`."""

from __future__ import annotations

import logging
import re
import time

from stoker.base.logging import LogEvent, get_logger, log_event
from stoker.server.telemetry.record import RequestRecord

log = get_logger("stoker.access")

MAX_CONTENT_CHARS = 8192  # of the prompt, and of each text, in a line
_PLAIN = re.compile(r"[\w./:;,+~*@{}\[\]-]+", re.ASCII).fullmatch


class AccessEvent(LogEvent, omit_defaults=True):
    """The values of one line. Tokens are sums over all generations of the request; times are in seconds, and None without a token."""

    id: str
    client: str
    protocol: str
    method: str
    route: str
    status: int
    total_s: float
    model: str = ""
    key: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    ttft_s: float | None = None
    queue_s: float | None = None
    finish: str = ""
    error: str = ""
    trace: str = ""
    prompt: list[str | list[int]] = []
    output: list[str] = []

    def __str__(self) -> str:
        """The values as name=value; one that contains spaces or quotes is quoted."""
        parts = [
            f"{self.method} {self.route} {self.status} id={_quoted(self.id)} client={self.client} protocol={self.protocol} "
            f"model={_quoted(self.model or '-')} key={_quoted(self.key or '-')} in={self.tokens_in} out={self.tokens_out} "
            f"cached={self.tokens_cached} total={self.total_s:.4f}"
        ]
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.4f}")
        if self.queue_s is not None:
            parts.append(f"queue={self.queue_s:.4f}")
        parts += [f"{name}={value}" for name in ("finish", "error", "trace") if (value := getattr(self, name))]
        if self.prompt or self.output:
            parts.append(f"prompt={self.prompt!r} output={self.output!r}")
        return " ".join(parts)


def log_request(record: RequestRecord, *, level: int = logging.INFO) -> None:
    """Write the line of a request that has ended."""
    if log.isEnabledFor(level):
        log_event(log, level, _event(record))


def _event(record: RequestRecord) -> AccessEvent:
    """The line of a record."""
    event = AccessEvent(
        record.request_id, record.client, record.protocol, record.method, record.route, record.status,
        round(time.monotonic() - record.started, 6), key=record.key, error=record.error,
    )  # fmt: skip
    if record.trace is not None:
        event.trace = record.trace.trace_id
    if record.generations:
        generation, usage = record.generations[0], record.usage()
        event.model, event.finish = generation.model, generation.finish_reason
        event.tokens_in, event.tokens_out, event.tokens_cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        if (first_s := record.time_to_first_token_s) is not None:
            event.ttft_s = round(first_s, 6)
        if generation.timings is not None:
            event.queue_s = round(generation.timings.queue_s, 6)
        if record.contents:
            event.prompt = [generation.prompt[:MAX_CONTENT_CHARS] for generation in record.generations if generation.prompt is not None]
            event.output = [text[:MAX_CONTENT_CHARS] for generation in record.generations for text in generation.texts]
    return event


def _quoted(text: str) -> str:
    """The text, in quotes if it contains anything but letters, digits and common punctuation."""
    return text if _PLAIN(text) else repr(text)
