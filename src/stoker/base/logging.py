"""Logging: one logger per module, and one line per record, as text or JSON, on standard error or in a file.

Each process retains its newest lines.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec

from stoker.base import env
from stoker.base.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "iso8601", "json")
MAX_LINES = 500  # that a process retains
MAX_LINE_CHARS = 4000

_encode_text = msgspec.json.Encoder().encode


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the log of one process. Records at or above `level` are logged, except those of the levels in `muted`."""

    level: str = "INFO"
    muted: tuple[str, ...] = ()
    file: str = ""  # lines are appended to it; empty: standard error
    format: str = "text"  # text: time of day; iso8601: date, time and time zone; json: one object per line


class LogEvent(msgspec.Struct):
    """A record with named values. In a JSON line they are members; in text, the line contains `str(event)`."""


class LogLine(msgspec.Struct, frozen=True):
    """One retained record of the log."""

    time_s: float  # since 1970
    level: str  # DEBUG, INFO, WARNING, ERROR or CRITICAL
    logger: str
    text: str  # with the traceback, if there is one
    pid: int


class RecentLines(logging.Handler):
    """Retains the newest MAX_LINES records. An event becomes text when the line is read, because there may be thousands per second."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[logging.LogRecord, str | None]] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, LogEvent):
            self._lines.append((record, None))
        else:
            text = self.format(record)
            shown = logging.LogRecord(record.name, record.levelno, "", 0, "", None, None)
            shown.created = record.created
            self._lines.append((shown, text))

    def after(self, time_s: float) -> list[LogLine]:
        """The retained lines that were logged after `time_s`, in seconds since 1970."""
        return [_line(record, text) for record, text in list(self._lines) if record.created > time_s]


def _line(record: logging.LogRecord, text: str | None) -> LogLine:
    """The line of a record with this text, or else of an event."""
    text = str(record.msg) if text is None else text
    shown = text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + " …"
    return LogLine(record.created, record.levelname, record.name, shown, os.getpid())


class _State:
    """The log of this process."""

    config = LogConfig()
    handler: logging.Handler | None = None  # writes the lines; None until the first `apply`
    recent = RecentLines()


def get_logger(name: str) -> logging.Logger:
    """The logger of the module with this `__name__`."""
    return logging.getLogger(name)


def current() -> LogConfig:
    """The configuration that `apply` has set last."""
    return _State.config


def configure(level: str | None = None) -> None:
    """Apply the configuration of the environment: STOKER_LOG (unless `level` is given), STOKER_LOG_FILE and STOKER_LOG_FORMAT.

    Raises ConfigError for an unknown format, and for a file that cannot be opened.
    """
    apply(LogConfig(level=level or env.log_level(), file=env.text("STOKER_LOG_FILE"), format=env.text("STOKER_LOG_FORMAT", "text").lower()))


def apply(config: LogConfig) -> None:
    """Use `config` for all of Stoker's loggers. Loggers of libraries are not changed.

    A file that another program has renamed, such as logrotate, is opened again. Raises ConfigError and then changes nothing.
    """
    if config.format not in FORMATS:
        raise ConfigError(f"the log format {config.format!r} is refused.", cure=f"Use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    root = logging.getLogger("stoker")
    if _State.handler is None or config.file != _State.config.file:
        handler = _open(config.file)
        if _State.handler is not None:
            root.removeHandler(_State.handler)
            _State.handler.close()
        root.addHandler(handler)
        root.propagate = False
        _State.handler = handler
    for handler in (_State.handler, _State.recent):
        handler.filters[:] = [_Mute(config.muted)] if config.muted else []
    _State.handler.setFormatter(_formatter(config.format))
    root.addHandler(_State.recent)
    root.setLevel(config.level)
    _State.config = config


def recent_lines(after_s: float) -> list[LogLine]:
    """The newest lines of this process's log that were logged after `after_s`, in seconds since 1970. At most MAX_LINES."""
    return _State.recent.after(after_s)


def log_event(log: logging.Logger, level: int, event: LogEvent) -> None:
    """Log an event without the search for its line of code, which takes most of the time of an ordinary record."""
    if log.isEnabledFor(level):
        log.handle(logging.LogRecord(log.name, level, "", 0, event, None, None))


def _open(file: str) -> logging.Handler:
    """A handler that appends to `file`, or writes to standard error if the name is empty. Raises ConfigError."""
    if not file:
        return logging.StreamHandler()
    try:
        return WatchedFileHandler(Path(file).absolute(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the log file {file!r} cannot be opened: {error.strerror}.", cure="Name a file in an existing folder.") from None


def _formatter(format_name: str) -> logging.Formatter:
    """The formatter of one of FORMATS."""
    if format_name == "json":
        return _JsonFormatter()
    if format_name == "iso8601":
        return _IsoFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s")
    return logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")


class _IsoFormatter(logging.Formatter):
    """Text with the time in UTC, such as 2026-01-31T23:59:59.123Z."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """The time of the record with milliseconds."""
        return _utc(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, with time, level, logger and message, and with the values of a LogEvent in place of the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        head = f'{{"time":"{_utc(record)}","level":"{record.levelname}","logger":"{record.name}",'
        if isinstance(record.msg, LogEvent):
            return head + _encode_text(record.msg)[1:].decode()
        values = {"message": record.getMessage()}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return head + _encode_text(values)[1:].decode("utf-8", "replace")


class _Mute(logging.Filter):
    """Drops the records of some levels."""

    def __init__(self, levels: tuple[str, ...]) -> None:
        super().__init__()
        self._levels = levels

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        return record.levelname not in self._levels


def _utc(record: logging.LogRecord) -> str:
    """The time of a record in UTC with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
