"""JSON objects of responses: usage, log-probabilities, finish reasons, errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from stoker.base.types import Delta, FinishReason, TokenLogprobs, Usage
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.protocols.common.logprobs import finite, scored_token, token_text
from stoker.server.telemetry.record import CURRENT

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",  # OpenAI has no finish reason for these; stop_reason distinguishes them
    FinishReason.CANCELLED: "length",
}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

encode = msgspec.json.encode


def failure_body(failure: Failure) -> bytes:
    """The body of an error response."""
    return encode({"error": failure_object(failure)})


def failure_object(failure: Failure) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {
        "message": failure.message,
        "type": ERROR_TYPES.get(failure.status, kind),
        "param": failure.field,
        "code": failure.code,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object, with the times of the phases if the client requested them (`X-Return-Timings`)."""
    record = CURRENT.get()
    timings = record.usage_timings() if record is not None else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **completion_details(usage),
        **({"timings_ms": timings} if timings else {}),
    }


def completion_details(usage: Usage) -> dict[str, Any]:
    """The member completion_tokens_details of a usage with draft tokens; none without."""
    accepted = usage.accepted_draft_tokens
    counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": usage.draft_tokens - accepted}
    return {"completion_tokens_details": counts} if usage.draft_tokens else {}


def stop_reason(reason: FinishReason, stop: int | str | None) -> int | str | None:
    """The stop token id or stop string that ended the answer; "deadline" or "cancelled" if one of these ended it."""
    return str(reason) if reason in (FinishReason.DEADLINE, FinishReason.CANCELLED) else stop


def add_usage(parts: Iterable[Usage]) -> Usage:
    """The sum of usages."""
    total = Usage()
    for part in parts:
        total.prompt_tokens += part.prompt_tokens
        total.completion_tokens += part.completion_tokens
        total.cached_tokens += part.cached_tokens
        total.draft_tokens += part.draft_tokens
        total.accepted_draft_tokens += part.accepted_draft_tokens
    return total


def update_usage(usage: Usage, delta: Delta) -> None:
    """Add a delta to the usage of a stream. Its first delta has the counts of the prompt, its last one all counts."""
    usage.completion_tokens += len(delta.token_ids)
    if (reported := delta.usage) is not None:
        usage.prompt_tokens, usage.cached_tokens = reported.prompt_tokens, reported.cached_tokens
        usage.completion_tokens = reported.completion_tokens or usage.completion_tokens
        usage.draft_tokens, usage.accepted_draft_tokens = reported.draft_tokens, reported.accepted_draft_tokens


class CompletionLogprobs:
    """Creates the `logprobs` objects of one completion choice, one per chunk of a stream.

    text_offset counts characters from the start of the choice's text, so it continues from chunk to chunk.
    """

    def __init__(self, service: Service, echo: str = "") -> None:
        self._service = service
        self._echo = echo
        self._offset = 0

    def object(self, entries: list[TokenLogprobs | None], first_id: int = 0) -> dict[str, Any]:
        """The `logprobs` object for the tokens of the next chunk, or of the whole choice.

        An entry of None is the first token of an echoed prompt, which has the id `first_id` and no log-probability.
        """
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in entries:
            text = token_text(self._service, first_id if entry is None else entry.token_id)
            lists["tokens"].append(text)
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._top(entry, text))
            if entry is not None or self._echo.startswith(text):  # the echo does not contain a prefix that the tokenizer added
                self._offset += len(text)
        return lists

    def _top(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        """The log-probability of each of the most likely tokens, by its text, and that of the chosen one."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(token_text(self._service, token_id), finite(logprob))
        top.setdefault(text, finite(entry.logprob))
        return top


def chat_logprobs(service: Service, entries: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The `logprobs` object of a chat choice, with `num_top` candidates per token."""
    return {
        "content": [{**scored_token(service, e.token_id, e.logprob), "top_logprobs": _chat_top(service, e, num_top)} for e in entries],
        "refusal": None,
    }


def _chat_top(service: Service, entry: TokenLogprobs, num_top: int) -> list[dict[str, Any]]:
    """The objects of the num_top most likely tokens."""
    return [scored_token(service, token_id, logprob) for token_id, logprob in entry.top[:num_top]]


def prompt_logprobs(service: Service, entries: list[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's format: for each prompt token, the candidates by id; None for the first token."""
    return [None if entry is None else _candidates(service, entry) for entry in entries]


def _candidates(service: Service, entry: TokenLogprobs) -> dict[str, Any]:
    """vLLM's object of a prompt token: log-probability, rank and text of it and of the most likely ones, by token id."""
    ranked = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    ranked.setdefault(entry.token_id, (0, entry.logprob))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank or None, "decoded_token": token_text(service, token_id)}
        for token_id, (rank, logprob) in ranked.items()
    }
