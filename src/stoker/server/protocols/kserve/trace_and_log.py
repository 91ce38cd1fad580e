"""Trace and log settings, as clients read and change them."""

from __future__ import annotations

import logging
from typing import Any

from stoker.base.logging import get_logger
from stoker.server.protocols.kserve.errors import TritonError

TRACE = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "", "trace_mode": "triton",
}  # fmt: skip
_LOG: dict[str, Any] = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0, "log_format": "default",
}  # fmt: skip
_TYPES = {"log_file": "a string", "log_info": "a boolean", "log_warning": "a boolean", "log_error": "a boolean",
          "log_verbose_level": "a number from 0 to 4", "log_format": "a string"}  # fmt: skip


class LogSettings:
    """The level of this process's log. A file and another format than the default are refused: the log is standard error."""

    def __init__(self) -> None:
        self._values = dict(_LOG)

    def shown(self) -> dict[str, Any]:
        return dict(self._values)

    def change(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Change all or nothing; the settings from then on. Raises TritonError for a name or value that cannot be."""
        for name, value in requested.items():
            _check_log(name, value)
        self._values |= requested
        get_logger("stoker").setLevel(self._level())
        return self.shown()

    def _level(self) -> int:
        levels = (("log_error", logging.ERROR), ("log_warning", logging.WARNING), ("log_info", logging.INFO))
        shown = [level for name, level in levels if self._values[name]]
        if self._values["log_verbose_level"] > 0:
            return logging.DEBUG
        return min(shown, default=logging.CRITICAL)


def check_trace(requested: dict[str, Any]) -> dict[str, Any]:
    """Tracing is off; asking for anything else is refused. Raises TritonError."""
    for name, value in requested.items():
        if name not in TRACE:
            raise TritonError(f"Unknown trace setting '{name[:80]}'. Known: {', '.join(TRACE)}.")
        if value not in (None, TRACE[name], [TRACE[name]], "OFF"):
            raise TritonError(f"trace setting '{name}' cannot be changed: requests are not traced. See the metrics for durations.")
    return TRACE


def _check_log(name: str, value: Any) -> None:
    if name not in _LOG:
        raise TritonError(f"Unknown log setting '{name[:80]}'. Known: {', '.join(_LOG)}.")
    right = type(value) is type(_LOG[name]) and (type(value) is not int or 0 <= value <= 4)
    if not right:
        raise TritonError(f"log setting '{name}' must be {_TYPES[name]}.")
    if type(value) is str and value != _LOG[name]:
        raise TritonError(f"log setting '{name}' cannot be changed: the log goes to standard error, in one format.")
