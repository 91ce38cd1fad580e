"""Commands in processes of their own that fork from one which has imported what they need: half of the time of a command is the import."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import NamedTuple

from stoker.cli.main import main

LIMIT_S = 100.0
PRELOADED = ["stoker.cli.main", "stoker.api.llm", "stoker.runtime.load"]


class Finished(NamedTuple):
    """The exit status of a command, and what it printed."""

    returncode: int | None  # None: it did not end
    stdout: str
    stderr: str


def run_forked(folder: Path, *args: str, stdin: str = "") -> Finished:
    """Run `stoker ARGS` with `stdin` as its standard input. Its output goes through files in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    files = [folder / f"command.{name}" for name in ("stdin", "stdout", "stderr")]
    files[0].write_text(stdin)
    process = context.Process(target=_run, args=(files, args))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    return Finished(process.exitcode, files[1].read_text(), files[2].read_text())


def _run(files: list[Path], args: tuple[str, ...]) -> None:
    """The forked process. Ends with the status of the command."""
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, (file, flags) in enumerate(zip(files, (os.O_RDONLY, write, write), strict=True)):
        os.dup2(os.open(file, flags), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one of the process
    sys.argv = ["stoker", *args]
    sys.exit(main())
