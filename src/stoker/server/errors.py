"""From any exception to one description of a failure; each protocol spells that in its own shape."""

from __future__ import annotations

import math

import msgspec

from stoker.base.errors import NotFoundError, QueueFullError, StokerError, UnavailableError
from stoker.base.logging import get_logger

log = get_logger(__name__)

RETRY_UNAVAILABLE_S = 5  # a server that is loading or whose executor was lost is worth asking again after so long


class MethodError(StokerError):
    """A route exists, but not for this method."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allowed: list[str]) -> None:
        self.allowed = allowed
        super().__init__(f"{method} is not allowed here.", cure=f"Use {' or '.join(allowed)}.")


class RouteError(NotFoundError):
    """No route has this path."""

    code = "unknown_route"

    def __init__(self, path: str) -> None:
        super().__init__(f"there is no route {path[:200]!r}.")


class AuthenticationError(StokerError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class BodyTooLargeError(StokerError):
    """A request's body exceeds max_request_bytes."""

    status = 413
    code = "request_too_large"

    def __init__(self, size: int | None, limit: int) -> None:
        has = f"has {size} bytes" if size is not None else f"has more than {limit} bytes"
        super().__init__(
            f"the request's body {has} and max_request_bytes is {limit}.", cure="Shorten the prompt, or raise --max-request-bytes."
        )


class BodyTimeoutError(StokerError):
    """A request's body does not go on."""

    status = 408
    code = "request_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing of the request's body came for {seconds:.0f} s.", cure="Send it without pauses.")


class BodyError(StokerError):
    """A request's body is not what its protocol reads: not JSON, not an object, damaged."""

    status = 400
    code = "bad_json"


class GenerationError(StokerError):
    """A sequence failed after it was accepted."""

    code = "generation_failed"


class Failure(msgspec.Struct, frozen=True):
    """What a client is told."""

    status: int
    code: str
    message: str
    field: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


def describe(error: BaseException) -> Failure:
    """The failure of `error`. An error that Stoker did not raise on purpose is logged, and told without its details."""
    if isinstance(error, RecursionError):  # just within what the parser takes, and too deep for what comes after it
        error = BodyError("the request's body is nested too deeply.", cure="Send it flatter.")
    if not isinstance(error, StokerError):
        log.error("a request failed: %r", error, exc_info=error)
        return Failure(500, "internal_error", "The server failed on this request. See its log.")
    return Failure(error.status, error.code, str(error), getattr(error, "field", None), tuple(_headers(error)))


def sequence_error(message: str | None, *, ready: bool) -> StokerError:
    """The error of a sequence that ended with FinishReason.ERROR: a lost executor is 503, anything else 500."""
    kind = GenerationError if ready else UnavailableError
    return kind(message or "the sequence failed.")


def _headers(error: StokerError) -> list[tuple[bytes, bytes]]:
    match error:
        case QueueFullError(retry_after_s=seconds):
            return [(b"retry-after", b"%d" % max(1, math.ceil(seconds)))]
        case UnavailableError():
            return [(b"retry-after", b"%d" % RETRY_UNAVAILABLE_S)]
        case MethodError(allowed=allowed):
            return [(b"allow", ", ".join(allowed).encode())]
        case AuthenticationError():
            return [(b"www-authenticate", b"Bearer")]
        case BodyTooLargeError() | BodyTimeoutError():
            return [(b"connection", b"close")]
    return []
