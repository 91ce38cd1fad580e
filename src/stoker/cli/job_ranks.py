"""Processes of an MPI or Slurm job: tensorrtllm_backend starts one tritonserver per rank, and Stoker's rank 0 starts all ranks itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from stoker.base.env import JobProcess
from stoker.base.logging import get_logger

log = get_logger(__name__)

_CHECK_S = 1.0
_JOB_NAMES = (b"PMIX_NAMESPACE", b"SLURM_JOB_ID", b"SLURM_STEP_ID")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def wait_for_first_rank(process: JobProcess) -> None:
    """Return when rank 0 or the launcher has ended, or after SIGTERM or SIGINT, which are blocked from now on.

    mpirun ends when all of its processes have ended, so this process must not outlive rank 0. Rank 0 is a process named tritonserver with
    rank 0 in its environment, which has the launcher as its parent or belongs to the same job.
    """
    log.info("rank %d of %d waits: rank 0 starts all ranks of the engine.", process.rank, process.size)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    launcher, first_rank = os.getppid(), None
    job = _job(_environment(Path("/proc/self")))
    while signal.sigtimedwait(_STOP_SIGNALS, _CHECK_S) is None and os.getppid() == launcher:
        if first_rank is None:
            first_rank = _find_first_rank(f"{process.variable}=0".encode(), launcher, job)
        elif _has_ended(first_rank):
            return


def _find_first_rank(entry: bytes, launcher: int, job: frozenset[bytes]) -> Path | None:
    """The /proc folder of the server whose environment has the entry "VARIABLE=0" and that has this launcher or job; None if not found."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        if _read(comm) != b"tritonserver\n":
            continue
        entries = _environment(comm.parent)
        if entry in entries and (_parent(comm.parent) == launcher or (job and _job(entries) == job)):
            return comm.parent
    return None


def _environment(folder: Path) -> frozenset[bytes]:
    """The entries of a process's environment."""
    return frozenset(_read(folder / "environ").split(b"\0"))


def _job(entries: frozenset[bytes]) -> frozenset[bytes]:
    """The entries that identify the job; empty if the launcher does not set them."""
    return frozenset(entry for entry in entries if entry.partition(b"=")[0] in _JOB_NAMES)


def _parent(folder: Path) -> int:
    """The process id of a process's parent; 0 if the process has ended."""
    fields = _read(folder / "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _has_ended(folder: Path) -> bool:
    """Whether the process has ended, or is a zombie."""
    state = _read(folder / "stat").rpartition(b")")[2].split()
    return not state or state[0] in (b"Z", b"X")


def _read(file: Path) -> bytes:
    """The content of a file in /proc; empty if the process has ended or belongs to another user."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
