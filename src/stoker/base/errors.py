"""The errors that Stoker raises on purpose. A message names the field or file, the value and the limit, and ends with the fix (`cure`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MAX_CHARS = 4000  # of a message; what it quotes may be a whole file


class StokerError(Exception):
    """Base of all errors that Stoker raises on purpose.

    `cure` is a sentence that explains how to fix the problem. It is appended to the message. Control characters in what a message quotes
    are escaped, because messages are written to terminals and logs, and long messages are cut in the middle.
    """

    status = 500  # HTTP status with which protocols report the error
    code = "internal_error"  # stable identifier for programs

    def __init__(self, message: str, *, cure: str = "") -> None:
        self.message = _printable(message)
        self.cure = _printable(cure)
        super().__init__(f"{self.message} {self.cure}".strip())


class ConfigError(StokerError):
    """A setting is invalid or not supported: an option, a field of a file, or an environment variable."""

    status = 400
    code = "bad_config"


class ConfigTypeError(ConfigError, TypeError):
    """A setting has a value of a wrong type, or a name that does not exist."""


class CheckpointError(StokerError):
    """A checkpoint is incomplete, damaged or not supported."""

    code = "bad_checkpoint"


class EngineError(StokerError):
    """An engine directory is incomplete, damaged, or built for another version or machine."""

    code = "bad_engine"


class RequestError(StokerError):
    """A request is refused because of the value of a field. `limit` completes the sentence "FIELD=VALUE is refused: ..."."""

    status = 400
    code = "bad_request"

    def __init__(self, field: str, value: Any, limit: str, *, cure: str = "") -> None:
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(f"{field}={shorten(value)} is refused: {limit}.", cure=cure)


class GuideCostError(RequestError):
    """The compilation of a request's grammar was ended at its limit of time or memory."""


class RequestTypeError(RequestError, TypeError):
    """A field of a request has a value of a wrong type."""


class NotFoundError(StokerError):
    """A model, version or route does not exist."""

    status = 404
    code = "not_found"


class QueueFullError(StokerError):
    """The waiting queue is full. `retry_after_s` is an estimate of when a request will be accepted."""

    status = 429
    code = "queue_full"

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{waiting} requests are waiting already, and max_queue_size is {limit}.",
            cure=f"Retry after {retry_after_s:.0f} s, or raise max_queue_size.",
        )


class UnavailableError(StokerError):
    """The server is loading or draining, or its executor has ended."""

    status = 503
    code = "unavailable"


class RankError(StokerError):
    """A worker process died or hangs. No step can run without it."""

    code = "rank_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message, cure="Read the log, and restart the server.")


class DependencyError(StokerError):
    """An optional package is required and not installed. `extra` is the extra of Stoker that installs it."""

    code = "missing_dependency"

    def __init__(self, package: str, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package}, which is not installed.", cure=f"Run: pip install 'stoker[{extra}]'.")


class UnsupportedVersionError(StokerError):
    """The installed version of a package lacks a part that Stoker uses. `lowest` and `highest` are tested versions."""

    code = "unsupported_version"

    def __init__(self, package: str, version: str, lowest: str, highest: str, problem: str) -> None:
        super().__init__(
            f"{package} {version} is not supported: it {problem}. Stoker was tested with {lowest} to {highest}.",
            cure=f"Run: pip install '{package}>={lowest},<={highest}'.",
        )


def first_line(problem: Exception) -> str:
    """The first line of another library's exception without its full stop, to be quoted in a message."""
    return next(iter(str(problem).splitlines()), type(problem).__name__).rstrip(".")


def shorten(value: Any, limit: int = 80) -> str:
    """The value for a message. Long strings and lists are replaced by their type and length."""
    if isinstance(value, (list, tuple, bytes, str)) and len(value) >= limit:
        return f"<{type(value).__name__} of length {len(value)}>"
    if not isinstance(value, (bytes, str)) and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of numpy or torch, as a number
    text = start_of_repr(value, limit)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def start_of_repr(value: Any, limit: int) -> str:
    """`repr(value)`, or at least its first `limit` characters. The time does not depend on the size of lists and objects."""
    if isinstance(value, dict):
        return _start_of_items("{", ((f"{key!r}: ", item) for key, item in value.items()), "}", limit)
    if type(value) is list:
        return _start_of_items("[", (("", item) for item in value), "]", limit)
    return repr(value)


def _start_of_items(opening: str, items: Iterable[tuple[str, Any]], closing: str, limit: int) -> str:
    """The items, which have a prefix each, until there are `limit` characters."""
    text = opening
    for prefix, item in items:
        if len(text) > limit:
            return text
        text += ("" if text == opening else ", ") + prefix + start_of_repr(item, limit - len(text))
    return text + closing


def _printable(text: str) -> str:
    """A text without the middle of a long one, and with control characters other than line breaks escaped."""
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]} … {text[-_MAX_CHARS // 2 :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def reason_of(error: Exception) -> str:
    """What an error of the operating system says, without its number and the file, which messages name themselves; else its text."""
    return getattr(error, "strerror", None) or str(error)
