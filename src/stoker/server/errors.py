"""Errors of the server, and the conversion of any exception to a `Failure`, which each protocol writes in its own format."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import msgspec

from stoker.base.errors import NotFoundError, QueueFullError, StokerError, UnavailableError
from stoker.base.logging import get_logger

log = get_logger(__name__)

RETRY_UNAVAILABLE_S = 5  # Retry-After while a model is loading or its executor is lost


_DISK_CURE = "Free space on its disk, or set --state-dir to a directory of another disk."


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


class ForbiddenError(StokerError):
    """A route that this server does not offer to any client, as it is configured."""

    status = 403
    code = "forbidden"


class BusyError(StokerError):
    """An operation of which there is one at a time is in progress."""

    status = 409
    code = "busy"


class RateLimitError(StokerError):
    """A named key has used a limit up. `limit_name` is its field in the file of the keys."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, key: str, limit_name: str, limit: int, retry_after_s: float) -> None:
        self.limit_name = limit_name
        self.retry_after_s = retry_after_s
        if limit_name in ("tokens_per_day", "tokens_per_month"):
            self.code = "insufficient_quota"
        super().__init__(f"the limit {limit_name}={limit} of the key {key} is reached.", cure=f"Retry after {_seconds(retry_after_s)} s.")


class ContentTypeError(StokerError):
    """The content type of a request is not one that its route reads."""

    status = 415
    code = "unsupported_media_type"

    def __init__(self, content_type: str, expected: str = "JSON with Content-Type: application/json") -> None:
        has = f"the content type {content_type[:80]!r} is" if content_type else "a request without Content-Type is"
        super().__init__(f"{has} refused here.", cure=f"Send {expected}.")


class BodyTooLargeError(StokerError):
    """A request's body exceeds max_request_bytes, or the lower limit of its route."""

    status = 413
    code = "request_too_large"

    def __init__(self, size: int | None, limit: int, *, of_route: bool = False) -> None:
        has = f"has {size} bytes" if size is not None else f"has more than {limit} bytes"
        name, cure = "max_request_bytes", "Shorten the prompt, or raise --max-request-bytes."
        if of_route:
            name, cure = "the limit of this route", "Shorten it."
        super().__init__(f"the request's body {has} and {name} is {limit}.", cure=cure)


class BodyTimeoutError(StokerError):
    """No more data of a request's body arrives."""

    status = 408
    code = "request_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no data of the request's body arrived for {seconds:.0f} s.", cure="Send it without pauses.")


class BodyError(StokerError):
    """A request's body is damaged, not JSON or not an object."""

    status = 400
    code = "bad_json"


class GenerationError(StokerError):
    """A sequence failed after it was accepted."""

    code = "generation_failed"


class StorageError(StokerError):
    """A file of the state directory could not be written, in most cases because the disk is full."""

    status = 507
    code = "insufficient_storage"

    def __init__(self, path: Path | str, reason: object) -> None:
        super().__init__(f"{path} cannot be written: {reason}.", cure=_DISK_CURE)


class Failure(msgspec.Struct, frozen=True):
    """An error as a client sees it. `status` is of HTTP; `field` is the request field that caused it, if any."""

    status: int
    code: str
    message: str
    field: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


def describe(error: BaseException) -> Failure:
    """The failure that describes `error`. An unexpected error is logged, and its details are not sent to the client."""
    if isinstance(error, RecursionError):  # the parser accepted the nesting depth, later code did not
        error = BodyError("the request's body is nested too deeply.", cure="Send it flatter.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = StorageError(error.filename or "a file of the state directory", error.strerror)
    if isinstance(error, StorageError):
        log.error("%s", error)
    if not isinstance(error, StokerError):
        log.error("a request failed: %r", error, exc_info=error)
        return Failure(500, "internal_error", "The server failed on this request. See its log.")
    return Failure(error.status, error.code, str(error), getattr(error, "field", None), tuple(_headers(error)))


def sequence_error(message: str | None, *, ready: bool) -> StokerError:
    """The error of a sequence that ended with FinishReason.ERROR. Its status is 503 if the executor was lost, otherwise 500."""
    kind = GenerationError if ready else UnavailableError
    return kind(message or "the sequence failed.")


def _headers(error: StokerError) -> list[tuple[bytes, bytes]]:
    """The headers that responses with this error need: Retry-After, Allow, WWW-Authenticate, Connection, or none."""
    match error:
        case QueueFullError(retry_after_s=seconds) | RateLimitError(retry_after_s=seconds):
            return [(b"retry-after", b"%d" % _seconds(seconds))]
        case UnavailableError():
            return [(b"retry-after", b"%d" % RETRY_UNAVAILABLE_S)]
        case MethodError(allowed=allowed):
            return [(b"allow", ", ".join(allowed).encode())]
        case AuthenticationError():
            return [(b"www-authenticate", b"Bearer")]
        case BodyTooLargeError() | BodyTimeoutError():
            return [(b"connection", b"close")]
    return []


def _seconds(retry_after_s: float) -> int:
    """The value of Retry-After: whole seconds, at least 1."""
    return max(1, math.ceil(retry_after_s))
