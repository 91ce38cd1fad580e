"""Processes of an MPI or Slurm job: tensorrtllm_backend starts one tritonserver per rank, and Stoker's rank 0 starts all ranks itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from stoker.base.env import JobProcess
from stoker.base.logging import get_logger

log = get_logger(__name__)

_CHECK_S = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def wait_for_first_rank(process: JobProcess) -> None:
    """Return when rank 0 or the launcher has ended, or after SIGTERM or SIGINT.

    mpirun ends when all of its processes have ended, so this process must not outlive rank 0. Rank 0 is found among the children of the
    launcher by its environment. If it cannot be found, because a script runs in between, only the launcher is watched.
    """
    log.info("rank %d of %d waits: rank 0 starts all ranks of the engine.", process.rank, process.size)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    launcher, first_rank = os.getppid(), None
    while signal.sigtimedwait(_STOP_SIGNALS, _CHECK_S) is None and os.getppid() == launcher:
        if first_rank is None:
            first_rank = _find_rank(launcher, f"{process.variable}=0".encode())
        elif _has_ended(first_rank):
            return


def _find_rank(launcher: int, entry: bytes) -> Path | None:
    """The /proc folder of the child of `launcher` whose environment has the entry "VARIABLE=RANK"."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in _read(children).split():
            folder = Path(f"/proc/{pid.decode()}")
            if entry in _read(folder / "environ").split(b"\0"):
                return folder
    return None


def _has_ended(folder: Path) -> bool:
    """Whether the process is gone or a zombie that its parent has not reaped yet."""
    state = _read(folder / "stat").rpartition(b")")[2].split()
    return not state or state[0] in (b"Z", b"X")


def _read(file: Path) -> bytes:
    """The content, or nothing if the process has ended or belongs to another user."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
