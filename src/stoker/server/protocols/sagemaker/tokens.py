"""The tokens of deltas and whole answers, each with its text. The joined texts are the answer."""

from __future__ import annotations

import msgspec

from stoker.base.types import Delta, FinishReason, TokenLogprobs
from stoker.frontend.service import Choice, Service
from stoker.server.protocols.common.logprobs import finite

NO_TOKEN = -1  # id in a record that must be sent although there is no token


class Token(msgspec.Struct):
    """One token. A `special` token has no text."""

    id: int
    text: str
    logprob: float | None
    special: bool = False
    top: list[tuple[int, float]] = []


def output_tokens(service: Service, delta: Delta | Choice) -> list[Token]:
    """The tokens of a delta or a whole answer, whose joined texts are the text of `delta`.

    Text that the detokenizer or the stop checker holds back (part of a character, the beginning of a stop string) belongs to a later token.
    """
    special = [token_id in service.end_ids or token_id == delta.stop_reason for token_id in delta.token_ids]
    plain = [i for i, is_special in enumerate(special) if not is_special] or list(range(len(special)))
    scores: list[TokenLogprobs | None] = [*delta.logprobs] if len(delta.logprobs) == len(special) else [None] * len(special)
    tokens, rest = [], delta.text
    for i, (token_id, score) in enumerate(zip(delta.token_ids, scores, strict=True)):
        text = ""
        if plain and i == plain[-1]:
            text = rest
        elif i in plain and rest.startswith(own_text := token_text(service, token_id)):
            text = own_text
        rest = rest[len(text) :]
        top = [(other_id, finite(logprob)) for other_id, logprob in score.top] if score else []
        tokens.append(Token(token_id, text, finite(score.logprob) if score else None, special[i], top))
    return tokens


def token_text(service: Service, token_id: int) -> str:
    """The text of a token alone. Incomplete UTF-8 becomes U+FFFD."""
    return service.token_bytes(token_id).decode("utf-8", "replace")


def prompt_tokens(service: Service, ids: list[int], logprobs: list[TokenLogprobs | None] | None) -> list[Token]:
    """The tokens of the prompt. The first has no log-probability, because no token precedes it."""
    scores: list[TokenLogprobs | None] = logprobs if logprobs is not None and len(logprobs) == len(ids) else [None] * len(ids)
    pairs = zip(ids, scores, strict=True)
    return [Token(token_id, token_text(service, token_id), finite(s.logprob) if s else None) for token_id, s in pairs]


def finish_name(reason: FinishReason, stop: int | str | None) -> str:
    """LMI's finish reason: eos_token, stop_sequence, or length, which also stands for a deadline and for cancellation."""
    if reason is FinishReason.STOP:
        return "stop_sequence" if isinstance(stop, str) else "eos_token"
    return "length"
