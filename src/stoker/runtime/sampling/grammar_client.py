"""The executor's side of the compile process: starts it, sends jobs to it and ends it."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import IO

import msgspec

from stoker.base import env
from stoker.base.errors import GuideCostError, RequestError, UnavailableError
from stoker.base.logging import get_logger
from stoker.base.types import Guide
from stoker.runtime.sampling.grammar_process import COMPILED, MAX_COMPILED_BYTES, REFUSED, STARTED_AT, Job

log = get_logger(__name__)

MAX_MEMORY_BYTES = 2 << 30  # for one compilation
START_TIMEOUT_S = 120.0  # for the import of xgrammar and the vocabulary, in the first compilation
_GRACE_S = 5.0  # by which an answer may arrive after the time limit


class _NotStartedError(Exception):
    """The compile process ended before it started a job."""


class CompileProcess:
    """A compile process, which starts with the first job, and again when it has ended. Jobs of several threads run concurrently."""

    def __init__(self, engine: Path, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False
        self.num_started = 0  # compilations

    @property
    def pid(self) -> int | None:
        """The process id; None before the first job and after `close`."""
        return self._running.process.pid if self._running is not None else None

    def compile(self, guide: Guide, timeout_s: float, memory_bytes: int = MAX_MEMORY_BYTES) -> str:
        """The serialized grammar of a guide. Its compilation may take `timeout_s` seconds, without the process's start, and `memory_bytes`.

        Raises RequestError for an invalid guide, GuideCostError if its compilation was killed at a limit, or UnavailableError if no process
        could be started.
        """
        job = Job(guide, timeout_s, memory_bytes)
        try:
            return self._run(job)
        except _NotStartedError:  # the process was ending
            try:
                return self._run(job)
            except _NotStartedError:
                raise UnavailableError(
                    "the process that compiles grammars does not start.", cure="Read the executor's log, and retry."
                ) from None

    def close(self) -> None:
        """Kill the process, and with it the compilations that run in it. Pending and later calls of `compile` raise UnavailableError."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.close()
                self._running = None

    def _run(self, job: Job) -> str:
        """Run a job. Raises the errors of `compile`, and _NotStartedError if the process ended before it started the job."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                running = self._send(theirs)
            started = _start_job(ours, job)
            with self._lock:
                self.num_started += 1
            try:
                return _finish_job(ours, job, started)
            except GuideCostError:
                if running.has_ended():
                    raise UnavailableError("the process that compiles grammars has ended.", cure="Retry.") from None
                raise

    def _send(self, connection: socket.socket) -> _Running:
        """Send a socket to the process, which is started if it does not run, and return the process.

        Raises UnavailableError after `close`, and _NotStartedError if a new process ends at once.
        """
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the executor is stopping.")
            if self._running is not None and self._running.send(connection):
                return self._running
            if self._running is not None:
                self._running.process.kill()  # it has ended, or is ending
                log.error("the compile process ended with status %d: %s", self._running.process.wait(), self._running.last_line())
                self._running.close()
            self._running = _Running(self._engine, self._vocab_size)
            if not self._running.send(connection):
                raise _NotStartedError
            return self._running


class _Running:
    """A running compile process. It is also ended when this object is collected, and when this program exits."""

    def __init__(self, engine: Path, vocab_size: int) -> None:
        self.control, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile(prefix="stoker-compile-")  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "stoker.runtime.sampling.grammar_process", str(engine), str(vocab_size)]
        with theirs:
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True,
                env=env.child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
            )  # fmt: skip
        self.process: subprocess.Popen[bytes] = process
        self.close = weakref.finalize(self, _end, process, self.control, self._errors)

    def has_ended(self) -> bool:
        """Whether the process has ended or is ending. Its end of the control socket is then closed; it never writes to that socket."""
        return self.control.fileno() < 0 or bool(select.select([self.control], [], [], 0)[0])

    def send(self, connection: socket.socket) -> bool:
        """Send a socket to the process. Returns False if the process has ended or is ending."""
        if self.has_ended():
            return False
        try:
            socket.send_fds(self.control, [b"j"], [connection.fileno()])
        except OSError:
            return False
        return True

    def last_line(self) -> str:
        """The last line of the process's output."""
        self._errors.seek(0)
        return next(iter(self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()[-1:]), "no output")


def _end(process: subprocess.Popen[bytes], control: socket.socket, errors: IO[bytes]) -> None:
    """Kill the process, wait for it, and close its files."""
    control.close()
    process.kill()
    process.wait()
    errors.close()


def _start_job(connection: socket.socket, job: Job) -> float:
    """Send a job, and wait until its compilation starts. Returns the monotonic seconds at which its time began.

    Raises _NotStartedError, or UnavailableError after START_TIMEOUT_S.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    connection.settimeout(START_TIMEOUT_S)
    # A process that ends closes the connection, which the next `recv` returns.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(msgspec.msgpack.encode(job))
        connection.shutdown(socket.SHUT_WR)
    started = _receive(connection, STARTED_AT.size)
    if len(started) == STARTED_AT.size:
        return float(STARTED_AT.unpack(started)[0])
    if time.monotonic() < deadline:
        raise _NotStartedError
    raise UnavailableError(f"a compilation of a grammar did not start in {START_TIMEOUT_S:g} s.", cure="Retry.")


def _finish_job(connection: socket.socket, job: Job, started: float) -> str:
    """The serialized grammar of a job that has started at `started`. Raises RequestError or GuideCostError."""
    guide = job.guide
    connection.settimeout(job.timeout_s + _GRACE_S)
    answer = _receive(connection, MAX_COMPILED_BYTES + 1)
    took = time.monotonic() - started
    match answer[:1]:
        case kind if kind == COMPILED:
            return answer[1:].decode()
        case kind if kind == REFUSED:
            raise RequestError("guide.text", guide.text, f"{guide.kind} is not accepted: {answer[1:].decode(errors='replace')}")
    log.warning("the compilation of a %s of %d characters was killed after %.1f s", guide.kind, len(guide.text), took)
    limit = f"within {job.timeout_s:g} s" if took >= job.timeout_s else f"in {job.memory_bytes >> 20} MiB of memory"
    raise GuideCostError("guide.text", guide.text, f"its grammar was not compiled {limit}", cure="Simplify it.")


def _receive(connection: socket.socket, limit: int) -> bytes:
    """At most `limit` bytes, fewer at the end of the stream or after the connection's time-out."""
    data = bytearray()
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while len(data) < limit and (part := connection.recv(min(1 << 20, limit - len(data)))):
            data += part
    return bytes(data)
