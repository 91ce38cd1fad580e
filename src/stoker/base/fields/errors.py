"""The error of a value that a field does not accept, and its translation to the errors that users see."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import ConfigError, RequestError

HIDDEN = "(hidden)"
MAX_SHOWN_CHARS = 80


class InvalidValueError(ValueError):
    """A value is not accepted. The code that knows the name of the field turns it into a `RequestError` or a `ConfigError`.

    `limit` completes the sentence "FIELD=VALUE is refused: ..." without a final period; `cure` is a sentence of its own.
    `path` locates `value` within the field's value: `[2]` for an item of a list, empty for the whole value.
    A `hidden` value may be a secret and is never printed.
    """

    def __init__(self, value: Any, limit: str, *, cure: str = "", path: str = "", hidden: bool = False) -> None:
        super().__init__(limit)
        self.value = value
        self.limit = limit
        self.cure = cure
        self.path = path
        self.hidden = hidden

    def within(self, path: str) -> InvalidValueError:
        """The same error for the container of the value, where the value is at `path`."""
        return InvalidValueError(self.value, self.limit, cure=self.cure, path=path + self.path, hidden=self.hidden)

    def request_error(self, field: str) -> RequestError:
        """The error for a client that sent the value in `field`."""
        return RequestError(field + self.path, HIDDEN if self.hidden else self.value, self.limit, cure=self.cure)

    def config_error(self, field: str, *, origin: object = "", cure: str = "Correct the value.") -> ConfigError:
        """The error for the author of a configuration, who wrote the value at `origin`, such as a file and line.

        `cure` is used when the error has none of its own. A list or mapping is replaced by its type, because it may contain secrets.
        """
        place = f"{origin}: " if str(origin) else ""
        return ConfigError(f"{place}{field}{self.path}={self._shown()} is refused: {self.limit}.", cure=self.cure or cure)

    def _shown(self) -> str:
        """The value for a message, without secrets, and shortened."""
        if self.hidden:
            return HIDDEN
        shown = f"<{type(self.value).__name__}>" if isinstance(self.value, (dict, list, tuple)) else str(self.value)
        return shown[:MAX_SHOWN_CHARS]
