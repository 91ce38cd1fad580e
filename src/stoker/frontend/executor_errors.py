"""Converts errors that the executor reports in outputs to exceptions."""

from __future__ import annotations

from stoker.base.errors import NotFoundError, QueueFullError, RequestError, StokerError, UnavailableError
from stoker.base.types import FinishReason
from stoker.runtime.request import ErrorInfo, SequenceOutput

KINDS: dict[str, type[StokerError]] = {kind.code: kind for kind in (RequestError, NotFoundError, QueueFullError, UnavailableError)}
DEFAULT_RETRY_S = 1.0


def to_error(info: ErrorInfo) -> StokerError:
    """The exception for `info`, with its message, status and code: of the class with that code, else a StokerError."""
    error = StokerError.__new__(KINDS.get(info.code, StokerError))
    StokerError.__init__(error, info.message)
    error.status, error.code = info.status, info.code
    if isinstance(error, QueueFullError):
        error.retry_after_s = DEFAULT_RETRY_S if info.retry_after_s is None else info.retry_after_s
    if isinstance(error, RequestError):
        error.field, error.value, error.limit, error.cure = info.field, None, info.limit or info.message, info.cure
    return error


def raise_refusal(outputs: list[SequenceOutput]) -> None:
    """Raise the error of a request if all of its first outputs are errors, so that no token was generated."""
    errors = [output.error for output in outputs if output.finish_reason is FinishReason.ERROR]
    if len(errors) == len(outputs) and errors:
        raise to_error(errors[0] or ErrorInfo("internal_error", "the request failed before its first token"))
