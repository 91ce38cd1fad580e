"""Triton's logging extension: the settings of the log, which clients read and change for all frontends of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.base import logging
from stoker.base.errors import ConfigError
from stoker.base.logging import LogConfig
from stoker.server.coordination import Coordination
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.telemetry.log_control import change_log

LOG_FORMATS = {"default": "text", "ISO8601": "iso8601", "JSON": "json"}  # Triton's name → that of Stoker's log
MAX_VERBOSE = 4
FILE_SUFFIX = ".log"
_LEVELS = {"log_info": "INFO", "log_warning": "WARNING", "log_error": "ERROR"}
_TYPES = {
    "log_file": (str, "a string"),
    "log_info": (bool, "a boolean"),
    "log_warning": (bool, "a boolean"),
    "log_error": (bool, "a boolean"),
    "log_verbose_level": (int, f"a number from 0 to {MAX_VERBOSE}"),
    "log_format": (str, f"one of {', '.join(LOG_FORMATS)}"),
}


class LogSettings:
    """The settings of the log, as Triton has them, of the process that this frontend belongs to."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._first_file = logging.current().file  # of the server's start
        self._verbose_level = 1  # the last positive one that a client has set; all of them enable debug messages

    def values(self) -> dict[str, Any]:
        """All settings with their present values."""
        config = logging.current()
        lowest = logging.LEVELS.index(config.level)
        shown = {name: logging.LEVELS.index(level) >= lowest and level not in config.muted for name, level in _LEVELS.items()}
        formats = {ours: tritons for tritons, ours in LOG_FORMATS.items()}
        verbose_level = self._verbose_level if config.level == "DEBUG" else 0
        return {"log_file": config.file, **shown, "log_verbose_level": verbose_level, "log_format": formats[config.format]}

    async def change(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Change settings in all frontends, and return all of them. Raises TritonError for an invalid one, and then changes none."""
        for name, value in requested.items():
            _check_type(name, value)
        values = self.values() | requested
        if values["log_file"] != logging.current().file:
            values["log_file"] = self._new_file(values["log_file"])
        if requested.get("log_verbose_level"):
            self._verbose_level = requested["log_verbose_level"]
        level = "DEBUG" if values["log_verbose_level"] else "INFO"
        muted = tuple(level for name, level in _LEVELS.items() if not values[name])
        config = LogConfig(level=level, muted=muted, file=values["log_file"], format=LOG_FORMATS[values["log_format"]])
        try:
            await change_log(self._coordination, config)
        except ConfigError as error:
            raise TritonError(str(error)) from None
        return self.values()

    def _new_file(self, name: str) -> str:
        """The path of another log file. Raises TritonError unless it is a .log file in the folder of the file at the server's start."""
        if not self._first_file:
            raise TritonError("log file location can not be updated through network protocol: the server was started without --log-file")
        folder = Path(self._first_file).parent
        path = folder / name
        if not name.isprintable() or path.parent != folder or path.suffix != FILE_SUFFIX or path.is_symlink():
            problem = f"log file location can not be updated to {name[:200]!r} through network protocol"
            raise TritonError(f"{problem}: it must be a {FILE_SUFFIX} file in the folder of the file that the server was started with")
        return str(path)


def _check_type(name: str, value: Any) -> None:
    """Raise TritonError for an unknown setting, and for a value that it cannot have."""
    if name not in _TYPES:
        raise TritonError(f"Unknown log setting '{name[:80]}'. Known: {', '.join(_TYPES)}.")
    kind, expected = _TYPES[name]
    valid = type(value) is kind and {"log_verbose_level": value in range(MAX_VERBOSE + 1), "log_format": value in LOG_FORMATS}.get(
        name, True
    )
    if not valid:
        raise TritonError(f"log setting '{name}' must be {expected}.")
