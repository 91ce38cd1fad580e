"""Converts errors that the executor reports back to exceptions."""

from __future__ import annotations

from stoker.base.errors import NotFoundError, QueueFullError, RequestError, StokerError, UnavailableError
from stoker.base.types import FinishReason
from stoker.runtime.request import ErrorInfo, SequenceOutput

KINDS: dict[str, type[StokerError]] = {kind.code: kind for kind in (RequestError, NotFoundError, QueueFullError, UnavailableError)}
DEFAULT_RETRY_S = 1.0


def to_error(info: ErrorInfo) -> StokerError:
    """An exception with the message, status and code of `info`. Its class is the one with that code, else StokerError."""
    error = StokerError.__new__(KINDS.get(info.code, StokerError))
    StokerError.__init__(error, info.message)
    error.status, error.code = info.status, info.code
    if isinstance(error, QueueFullError):
        error.retry_after_s = DEFAULT_RETRY_S if info.retry_after_s is None else info.retry_after_s
    if isinstance(error, RequestError):
        error.field, error.value, error.limit, error.cure = info.field, None, info.limit or info.message, info.cure
    return error


def raise_refusal(outputs: list[SequenceOutput]) -> None:
    """Raise the error of a request whose first outputs are all failures, so that no token was generated."""
    errors = [output.error for output in outputs if output.finish_reason is FinishReason.ERROR]
    if len(errors) == len(outputs) and errors:
        raise to_error(errors[0] or ErrorInfo("internal_error", "the request failed before its first token"))
