"""One tree of errors. Every message says what is wrong, with which value and limit, and ends with the cure."""

from __future__ import annotations

from typing import Any


class StokerError(Exception):
    """Root of every error Stoker raises on purpose.

    `cure` is a sentence that tells the reader what to do; it is appended to the message.
    """

    status = 500  # HTTP status that a protocol adapter maps this error to
    code = "internal_error"

    def __init__(self, message: str, *, cure: str = "") -> None:
        self.message = message
        self.cure = cure
        super().__init__(f"{message} {cure}".strip())


class ConfigError(StokerError):
    """A setting (flag, file or environment) cannot be honoured."""

    status = 400
    code = "bad_config"


class CheckpointError(StokerError):
    """The checkpoint is missing something, holds something unknown, or is damaged."""

    code = "bad_checkpoint"


class EngineError(StokerError):
    """The engine directory is damaged, from another version, or for another machine."""

    code = "bad_engine"


class RequestError(StokerError):
    """A request is refused before it disturbs anything; names the field, its value and the limit."""

    status = 400
    code = "bad_request"

    def __init__(self, field: str, value: Any, limit: str, *, cure: str = "") -> None:
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(f"{field}={_shorten(value)} is refused: {limit}.", cure=cure)


class NotFoundError(StokerError):
    """A model, version or route that does not exist."""

    status = 404
    code = "not_found"


class QueueFullError(StokerError):
    """The bounded queue is full; `retry_after_s` says when a place is likely."""

    status = 429
    code = "queue_full"

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{waiting} requests wait already and max_queue_size is {limit}.",
            cure=f"Retry after {retry_after_s:.0f} s, or raise max_queue_size.",
        )


class UnavailableError(StokerError):
    """The server is loading, draining, or its executor is gone."""

    status = 503
    code = "unavailable"


class RankError(StokerError):
    """A process that holds a part of the model died or hangs; nothing can be computed without it."""

    code = "rank_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message, cure="Read the log, and start again.")


class DependencyError(StokerError):
    """An optional package is needed for what was asked."""

    code = "missing_dependency"

    def __init__(self, package: str, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package}, which is not installed.", cure=f"Run: pip install 'stoker[{extra}]'.")


def first_line(problem: Exception) -> str:
    """The first line of another library's exception, without its full stop, to be quoted in a message."""
    return next(iter(str(problem).splitlines()), type(problem).__name__).rstrip(".")


def _shorten(value: Any, limit: int = 80) -> str:
    """The value as a message shows it; long ones by their type and length only."""
    if isinstance(value, (list, tuple, bytes, str)) and len(value) >= limit:
        return f"<{type(value).__name__} of length {len(value)}>"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
