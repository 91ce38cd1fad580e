"""One logger a module, one line a record, to stderr."""

from __future__ import annotations

import logging

from stoker.base import env


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure(level: str | None = None) -> None:
    """Set up Stoker's loggers once for a process; libraries keep their own."""
    root = logging.getLogger("stoker")
    root.setLevel(level or env.log_level())
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
