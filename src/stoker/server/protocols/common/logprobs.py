"""Tokens and log-probabilities as JSON."""

from __future__ import annotations

import math
from typing import Any

from stoker.frontend.service import Service

MIN_LOGPROB = -9999.0  # instead of -Infinity, which JSON cannot represent; OpenAI writes the same


def token_text(service: Service, token_id: int) -> str:
    """The text of a token. Bytes that are only part of a character are written as escapes, as OpenAI does."""
    text = service.token_bytes(token_id)
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def finite(logprob: float) -> float:
    """The log-probability as a number that JSON can represent."""
    return max(logprob, MIN_LOGPROB) if not math.isnan(logprob) else MIN_LOGPROB


def scored_token(service: Service, token_id: int, logprob: float) -> dict[str, Any]:
    """OpenAI's object of a token with its log-probability and its bytes, which Ollama has, too."""
    return {"token": token_text(service, token_id), "logprob": finite(logprob), "bytes": list(service.token_bytes(token_id))}
