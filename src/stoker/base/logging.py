"""Logging to stderr: one logger per module, and one line per record. Each process retains its newest lines."""

from __future__ import annotations

import logging
import os
from collections import deque

import msgspec

from stoker.base import env

MAX_LINES = 500  # that a process retains
MAX_LINE_CHARS = 4000


class LogLine(msgspec.Struct, frozen=True):
    """One record of the log."""

    time_s: float  # since 1970
    level: str  # DEBUG, INFO, WARNING, ERROR or CRITICAL
    logger: str
    text: str  # with the traceback, if there is one
    pid: int


class RecentLines(logging.Handler):
    """Retains the newest MAX_LINES records."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        shown = text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + " …"
        self._lines.append(LogLine(record.created, record.levelname, record.name, shown, os.getpid()))

    def after(self, time_s: float) -> list[LogLine]:
        """The retained lines that were logged after `time_s`, in seconds since 1970."""
        return [line for line in list(self._lines) if line.time_s > time_s]


_recent = RecentLines()


def get_logger(name: str) -> logging.Logger:
    """The logger of the module with this `__name__`."""
    return logging.getLogger(name)


def configure(level: str | None = None) -> None:
    """Set the level of Stoker's loggers (by default STOKER_LOG), and attach the handlers once. Loggers of libraries are not changed."""
    root = logging.getLogger("stoker")
    root.setLevel(level or env.log_level())
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.addHandler(_recent)
        root.propagate = False


def recent_lines(after_s: float) -> list[LogLine]:
    """The newest lines of this process's log that were logged after `after_s`, in seconds since 1970. At most MAX_LINES."""
    return _recent.after(after_s)
