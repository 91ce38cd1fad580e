"""The options of the log, for commands that run a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stoker.base import env, logging
from stoker.base.config import check_choice

_LEVELS = tuple(level.lower() for level in logging.LEVELS)

LogLevel = Annotated[
    str | None, typer.Option("--log-level", help=f"{', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}. Default: STOKER_LOG, or info.")
]
LogFile = Annotated[
    Path | None, typer.Option("--log-file", help="Append the log to this file. Default: STOKER_LOG_FILE, or standard error.")
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        help="text, iso8601 (text with date and time zone) or json (one object per line). Default: STOKER_LOG_FORMAT, or text.",
    ),
]


def use_default_level(level: str | None) -> None:
    """Log at `level` in this process and its children, unless --log-level or STOKER_LOG has set a level. None changes nothing."""
    if level is not None and not env.text("STOKER_LOG"):
        env.set_log(level=level)
        logging.configure()


@contextmanager
def logging_to(file: Path | None, level: str | None = None, log_format: str | None = None) -> Iterator[None]:
    """In the block, log from this process and its children to `file`, to which their other output on standard error is appended, too.

    None leaves what the environment has. Raises ConfigError for an unknown level or format, and for a file that cannot be opened.
    """
    if level is not None:
        check_choice("log_level", level.lower(), _LEVELS)
    if log_format is not None:
        check_choice("log_format", log_format, logging.FORMATS)
    env.set_log(level=level, file=None if file is None else str(file.absolute()), log_format=log_format)
    logging.configure()
    if file is None:
        yield
        return
    with file.open("ab") as target:
        original_stderr = os.dup(2)
        os.dup2(target.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original_stderr, 2)
            os.close(original_stderr)
