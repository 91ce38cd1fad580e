"""The `stoker` command."""

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
from stoker.cli.command import Command, group

COMMANDS = (
    Command("build", "stoker.cli.build:build", "Build an engine from a checkpoint.", "stoker build ./Llama-3.1-8B-Instruct -o engine"),
    Command("serve", "stoker.cli.serve:serve", "Serve an engine over HTTP with in-flight batching.", "stoker serve engine --port 8000"),
    Command("generate", "stoker.cli.generate:generate", "Continue prompts, in this process.", 'stoker generate engine "Once upon a time"'),
    Command("chat", "stoker.cli.chat:chat", "Talk with a model in the terminal.", "stoker chat engine"),
    Command("inspect", "stoker.cli.inspect:inspect", "Show what an engine is, and check its files.", "stoker inspect engine --verify"),
    Command("eval", "stoker.cli.eval:COMMANDS", "Measure how good an engine is.", "stoker eval perplexity engine --text book.txt"),
    Command("export", "stoker.cli.export:COMMANDS", "Write an engine in another server's format.", "stoker export triton engine repo"),
    Command("package", "stoker.cli.package:COMMANDS", "Write an engine as one file for another service.", "stoker package lmi engine"),
    Command("triton", "stoker.cli.triton:COMMANDS", "Check, fill and measure Triton repositories.", "stoker triton lint repo"),
    Command("launch", "stoker.cli.launch:launch", "Serve a Triton repository on Triton's ports.", "stoker launch --model_repo repo"),
    Command("client", "stoker.cli.client:client", "Ask a Triton server, over gRPC or HTTP.", 'stoker client "Once upon a time" -S'),
    Command("bench", "stoker.cli.bench:COMMANDS", "Measure latency, throughput or a server.", "stoker bench throughput engine"),
    Command("doctor", "stoker.cli.doctor:doctor", "Tell what this machine can run, and why not.", "stoker doctor"),
    Command("demo", "stoker.cli.demo:demo", "Build, serve and ask a small model, all by itself.", "stoker demo"),
)
SUMMARY = "Builds LLM engines from Hugging Face checkpoints and keeps them fed."
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
WRONG_ASK = (ConfigError, RequestError, NotFoundError)  # what was asked cannot be; other errors are of files and machines

PLACES = "--output, STOKER_CACHE and TMPDIR name places"
CURES = {
    errno.ENOSPC: f"Free space on that disk, or write to another: {PLACES}.",
    errno.EDQUOT: f"Free space on that disk, or write to another: {PLACES}.",
    errno.EROFS: f"Write to another folder: {PLACES}.",
    errno.EACCES: f"Allow it, or write to another folder: {PLACES}.",
}


def main() -> int:
    """Run the command line; the exit status. 1: it failed; 2: it was asked wrongly; 130: Ctrl-C; 143: SIGTERM.

    Errors are one line on stderr. STOKER_LOG=debug adds the traceback.
    """
    _write_anything()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        check_choice("STOKER_LOG", env.log_level(), LEVELS)
        logging.configure(None if env.text("STOKER_LOG") else "WARNING")
        group("stoker", COMMANDS, SUMMARY, options)(prog_name="stoker")
        return 0
    except StokerError as error:
        return _fail(str(error), 2 if isinstance(error, WRONG_ASK) else 1)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _fail(_told(error), 1)
    except Exception as error:
        return _fail(f"internal error: {type(error).__name__}: {error}. STOKER_LOG=debug shows where.", 1)


def _terminated(number: int, frame: object) -> NoReturn:
    """End as Ctrl-C does: half-built engines and servers that this process started go; as a container's first process it ends at all."""
    raise SystemExit(128 + number)


def _write_anything() -> None:
    """What the terminal's encoding does not have becomes a question mark; an answer's emoji must not end the answer."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def _told(error: OSError) -> str:
    what = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    return f"{what}. {CURES.get(error.errno or 0, '')}".rstrip()


def _version(asked: bool) -> None:
    if asked:
        from stoker import __version__

        typer.echo(f"stoker {__version__}")
        raise typer.Exit


def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """What stands before the command; `_version` has answered by now."""


def _fail(message: str, status: int) -> int:
    if env.log_level() == "DEBUG":
        traceback.print_exc()
    print("stoker: " + " ".join(message.split("\n")), file=sys.stderr)
    return status
