"""Deltas as tokens that have texts, which joined are the answer."""

from __future__ import annotations

import msgspec

from stoker.base.types import Delta, FinishReason, TokenLogprobs
from stoker.frontend.service import Choice, Service
from stoker.server.protocols.openai.response_json import finite

NO_TOKEN = -1  # the id of a line that has to be sent and has no token


class Token(msgspec.Struct):
    """One token. `special` ones make no text."""

    id: int
    text: str
    logprob: float | None
    special: bool = False
    top: list[tuple[int, float]] = []


def spelled(service: Service, delta: Delta | Choice) -> list[Token]:
    """The tokens of a delta, or of a whole answer. The text of one that is held back (half a character, the beginning of a stop
    string) stands at a later one, so that the texts joined are the delta's text."""
    special = [token_id in service.end_ids or token_id == delta.stop_reason for token_id in delta.token_ids]
    plain = [i for i, is_special in enumerate(special) if not is_special] or list(range(len(special)))
    scores: list[TokenLogprobs | None] = [*delta.logprobs] if len(delta.logprobs) == len(special) else [None] * len(special)
    tokens, rest = [], delta.text
    for i, (token_id, score) in enumerate(zip(delta.token_ids, scores, strict=True)):
        text = ""
        if plain and i == plain[-1]:
            text = rest
        elif i in plain and rest.startswith(piece := token_text(service, token_id)):
            text = piece
        rest = rest[len(text) :]
        top = [(other, finite(logprob)) for other, logprob in score.top] if score else []
        tokens.append(Token(token_id, text, finite(score.logprob) if score else None, special[i], top))
    return tokens


def token_text(service: Service, token_id: int) -> str:
    return service.token_bytes(token_id).decode("utf-8", "replace")


def prefill(service: Service, ids: list[int], scores: list[TokenLogprobs | None] | None) -> list[Token]:
    """The prompt's tokens; nothing predicts the first."""
    given: list[TokenLogprobs | None] = scores if scores is not None and len(scores) == len(ids) else [None] * len(ids)
    pairs = zip(ids, given, strict=True)
    return [Token(token_id, token_text(service, token_id), finite(s.logprob) if s else None) for token_id, s in pairs]


def finish_name(reason: FinishReason, stop: int | str | None) -> str:
    """eos_token, stop_sequence or length; a deadline or an operator cuts as length does."""
    if reason is FinishReason.STOP:
        return "stop_sequence" if isinstance(stop, str) else "eos_token"
    return "length"
