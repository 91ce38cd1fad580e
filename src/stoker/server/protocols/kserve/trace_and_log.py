"""Triton's trace and log settings, which clients read and change."""

from __future__ import annotations

import logging
from typing import Any

from stoker.base.logging import get_logger
from stoker.server.protocols.kserve.errors import TritonError

TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_LOG: dict[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
_LOG_TYPES = {
    "log_file": "a string",
    "log_info": "a boolean",
    "log_warning": "a boolean",
    "log_error": "a boolean",
    "log_verbose_level": "a number from 0 to 4",
    "log_format": "a string",
}


class LogSettings:
    """The log level of this process. A file and a format are refused, because the log goes to standard error in one format."""

    def __init__(self) -> None:
        self._values = dict(_LOG)

    def values(self) -> dict[str, Any]:
        """All settings with their present values."""
        return dict(self._values)

    def change(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Change settings and return all of them. Raises TritonError for an invalid name or value, and then changes none."""
        for name, value in requested.items():
            _check_log(name, value)
        self._values |= requested
        get_logger("stoker").setLevel(self._level())
        return self.values()

    def _level(self) -> int:
        """The lowest enabled level. Verbose output enables DEBUG."""
        levels = (("log_error", logging.ERROR), ("log_warning", logging.WARNING), ("log_info", logging.INFO))
        enabled = [level for name, level in levels if self._values[name]]
        if self._values["log_verbose_level"] > 0:
            return logging.DEBUG
        return min(enabled, default=logging.CRITICAL)


def check_trace(requested: dict[str, Any]) -> dict[str, Any]:
    """The trace settings, which cannot be changed. Raises TritonError for other values, because requests are not traced."""
    for name, value in requested.items():
        if name not in TRACE:
            raise TritonError(f"Unknown trace setting '{name[:80]}'. Known: {', '.join(TRACE)}.")
        if value not in (None, TRACE[name], [TRACE[name]], "OFF"):
            raise TritonError(f"trace setting '{name}' cannot be changed: requests are not traced. See the metrics for durations.")
    return TRACE


def _check_log(name: str, value: Any) -> None:
    """Raise TritonError for an unknown setting, a wrong type, and a text setting that differs from the fixed value."""
    if name not in _LOG:
        raise TritonError(f"Unknown log setting '{name[:80]}'. Known: {', '.join(_LOG)}.")
    valid = type(value) is type(_LOG[name]) and (type(value) is not int or 0 <= value <= 4)
    if not valid:
        raise TritonError(f"log setting '{name}' must be {_LOG_TYPES[name]}.")
    if type(value) is str and value != _LOG[name]:
        raise TritonError(f"log setting '{name}' cannot be changed: the log goes to standard error, in one format.")
