"""Entry point of the `stoker` command: runs the command line and turns errors into one line on stderr and an exit status."""

from __future__ import annotations

import errno
import io
import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from stoker.base import env, logging
from stoker.base.config import check_choice
from stoker.base.errors import ConfigError, NotFoundError, RequestError, StokerError
from stoker.base.process import collect_rarely
from stoker.cli.command_table import USAGE_ERROR, command_group, usage_problem
from stoker.cli.commands import COMMANDS

SUMMARY = "Build LLM engines from Hugging Face checkpoints and serve them with in-flight batching."
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
USAGE_ERRORS = (ConfigError, RequestError, NotFoundError)  # wrong input; other errors are of files and machines

_PLACES = "--output, STOKER_CACHE and TMPDIR name places"
CURES = {
    errno.ENOSPC: f"Free space on that disk, or write to another: {_PLACES}.",
    errno.EDQUOT: f"Free space on that disk, or write to another: {_PLACES}.",
    errno.EROFS: f"Write to another folder: {_PLACES}.",
    errno.ENOENT: f"Correct the path: {_PLACES}.",
    errno.ENOTDIR: f"Correct the path, of which a part is a file: {_PLACES}.",
    errno.EEXIST: f"Name a folder: {_PLACES}.",
    errno.EACCES: f"Allow it, or write to another folder: {_PLACES}.",
}


def main() -> int:
    """Run the command line and return the exit status: 0 for success, 1 for a failure, 2 for wrong input, 130 for Ctrl-C, 143 for SIGTERM.

    An error is printed as one line on stderr; STOKER_LOG=debug adds the traceback.
    """
    collect_rarely()
    _replace_unencodable_characters()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        check_choice("STOKER_LOG", env.log_level(), LOG_LEVELS)
        logging.configure(None if env.text("STOKER_LOG") else "WARNING")
        return command_group("stoker", COMMANDS, SUMMARY, global_options)(prog_name="stoker", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx is not None else "stoker"
        return _report(f"{usage_problem(error)}. See {command} --help.", error.exit_code)
    except StokerError as error:
        return _report(str(error), 2 if isinstance(error, USAGE_ERRORS) else 1)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _report(_describe(error), 1)
    except Exception as error:
        return _report(f"internal error: {type(error).__name__}: {error}. STOKER_LOG=debug shows where.", 1)


def _print_version(requested: bool) -> None:
    """Print the version and exit, if it is requested."""
    if requested:
        from stoker import __version__

        typer.echo(f"stoker {__version__}")
        raise typer.Exit


def global_options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Declares the options before the command name. Their callbacks have run already when this is called."""


def _exit_on_sigterm(number: int, frame: object) -> NoReturn:
    """Unwind the stack as Ctrl-C does, so that half-built engines are removed and started servers are stopped.

    Without a handler, SIGTERM would have no effect on the first process of a container.
    """
    raise SystemExit(128 + number)


def _replace_unencodable_characters() -> None:
    """Print a question mark for a character that the terminal's encoding lacks. By default Python would raise UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def _describe(error: OSError) -> str:
    """The message for an OSError, with a fix for common ones."""
    message = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    return f"{message}. {CURES.get(error.errno or 0, '')}".rstrip()


def _report(message: str, status: int) -> int:
    """Print an error as one line on stderr, and return `status`."""
    if env.log_level() == "DEBUG":
        traceback.print_exc()
    print("stoker: " + " ".join(message.split("\n")), file=sys.stderr)
    return status
