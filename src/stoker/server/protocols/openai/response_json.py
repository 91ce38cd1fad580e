"""JSON that every answer shares: usage, log-probabilities, finish reasons, failures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from stoker.base.types import Delta, FinishReason, TokenLogprobs, Usage
from stoker.frontend.service import Service
from stoker.server.errors import Failure

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity; what OpenAI writes
FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",  # OpenAI has no word for an answer cut from outside; stop_reason tells which it was
    FinishReason.CANCELLED: "length",
}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

encode = msgspec.json.encode


def failure_body(failure: Failure) -> bytes:
    return encode({"error": failure_object(failure)})


def failure_object(failure: Failure) -> dict[str, Any]:
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {
        "message": failure.message, "type": ERROR_TYPES.get(failure.status, kind), "param": failure.field, "code": failure.code,
    }  # fmt: skip


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def stop_reason(reason: FinishReason, given: int | str | None) -> int | str | None:
    """The stop id or stop string that ended the answer, or what cut it from outside."""
    return str(reason) if reason in (FinishReason.DEADLINE, FinishReason.CANCELLED) else given


def add_usage(parts: Iterable[Usage]) -> Usage:
    total = Usage()
    for part in parts:
        total.prompt_tokens += part.prompt_tokens
        total.completion_tokens += part.completion_tokens
        total.cached_tokens += part.cached_tokens
    return total


def count(usage: Usage, delta: Delta) -> None:
    """Keep a stream's usage: its first delta tells the prompt's side, its last one all."""
    usage.completion_tokens += len(delta.token_ids)
    if (reported := delta.usage) is not None:
        usage.prompt_tokens, usage.cached_tokens = reported.prompt_tokens, reported.cached_tokens
        usage.completion_tokens = reported.completion_tokens or usage.completion_tokens


def token_text(service: Service, token_id: int) -> str:
    """A token's text; bytes that are only part of a character are spelt out, as OpenAI does."""
    piece = service.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


class LogprobTexts:
    """The completions shape. text_offset counts characters from the start of the choice's text, over all its chunks."""

    def __init__(self, service: Service, echo: str = "") -> None:
        self._service = service
        self._echo = echo
        self._offset = 0

    def shape(self, entries: list[TokenLogprobs | None], first_id: int = 0) -> dict[str, Any]:
        """None stands for a prompt's first token, `first_id`, which nothing predicts."""
        shaped: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in entries:
            text = token_text(self._service, first_id if entry is None else entry.token_id)
            shaped["tokens"].append(text)
            shaped["text_offset"].append(self._offset)
            shaped["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            shaped["top_logprobs"].append(None if entry is None else self._top(entry, text))
            if entry is not None or self._echo.startswith(text):  # the echo leaves out a prefix that the tokenizer added
                self._offset += len(text)
        return shaped

    def _top(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(token_text(self._service, token_id), finite(logprob))
        top.setdefault(text, finite(entry.logprob))
        return top


def chat_logprobs(service: Service, entries: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    return {
        "content": [{**_chat_token(service, e.token_id, e.logprob), "top_logprobs": _chat_top(service, e, num_top)} for e in entries],
        "refusal": None,
    }


def _chat_top(service: Service, entry: TokenLogprobs, num_top: int) -> list[dict[str, Any]]:
    return [_chat_token(service, token_id, logprob) for token_id, logprob in entry.top[:num_top]]


def _chat_token(service: Service, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(service, token_id), "logprob": finite(logprob), "bytes": list(service.token_bytes(token_id))}


def prompt_logprobs(service: Service, entries: list[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token, the candidates by id; None for the first."""
    return [None if entry is None else _candidates(service, entry) for entry in entries]


def _candidates(service: Service, entry: TokenLogprobs) -> dict[str, Any]:
    ranked = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    ranked.setdefault(entry.token_id, (0, entry.logprob))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank or None, "decoded_token": token_text(service, token_id)}
        for token_id, (rank, logprob) in ranked.items()
    }
