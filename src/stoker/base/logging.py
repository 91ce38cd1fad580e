"""Logging to stderr: one logger per module, and one line per record."""

from __future__ import annotations

import logging

from stoker.base import env


def get_logger(name: str) -> logging.Logger:
    """The logger of the module with this `__name__`."""
    return logging.getLogger(name)


def configure(level: str | None = None) -> None:
    """Set the level of Stoker's loggers (by default STOKER_LOG), and attach a handler once. Loggers of libraries are not changed."""
    root = logging.getLogger("stoker")
    root.setLevel(level or env.log_level())
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
