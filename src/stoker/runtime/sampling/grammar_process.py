"""The compile process: a program that compiles each guide in a child process with limited time and memory.

It loads xgrammar and the vocabulary once. For each socket that arrives on its control socket (standard input), it forks a child, which
reads one job from that socket, compiles it and writes the answer. The kernel kills a child at its time limit (SIGALRM), which also ends
calls of xgrammar that do not return. Children are killed when this process ends, and it ends when the control socket is closed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.process import importing
from stoker.base.types import Guide
from stoker.runtime.sampling.grammar_source import compile_guide, load_vocabulary

# The serialized grammar. Its loading takes 0.05 s per MiB, in the executor, outside the step loop.
MAX_COMPILED_BYTES = 64 << 20
# What a child sends: STARTED_AT, the monotonic seconds at which its time began; then COMPILED and JSON, or REFUSED and a reason.
STARTED_AT = struct.Struct("<d")
COMPILED, REFUSED = b"C", b"R"

_PR_SET_PDEATHSIG = 1  # of prctl(2)


class Job(msgspec.Struct, frozen=True):
    """The request for one compilation."""

    guide: Guide
    timeout_s: float
    memory_bytes: int  # address space beyond that of the compile process


def main(engine: Path, vocab_size: int) -> None:
    """Fork a child for each socket that arrives, until the control socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    parent = os.getpid()
    with importing():  # xgrammar imports torch
        vocabulary = load_vocabulary(engine, vocab_size)
    prctl = ctypes.CDLL(None).prctl
    with socket.socket(fileno=0) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork():
                    continue
                try:
                    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() == parent:
                        control.close()
                        _serve(connection, vocabulary)
                finally:
                    os._exit(0)


def _serve(connection: socket.socket, vocabulary: Any) -> None:
    """Answer the job of one connection, in a child process. Raises MemoryError, after which the connection ends without an answer."""
    with connection.makefile("rb") as file:
        job = msgspec.msgpack.decode(file.read(), type=Job)
    connection.sendall(STARTED_AT.pack(_limit(job)))
    try:
        text = compile_guide(vocabulary, job.guide).serialize_json().encode()
        if len(text) > MAX_COMPILED_BYTES:
            raise ValueError(f"compiled, it has {len(text) >> 20} MiB, and may have {MAX_COMPILED_BYTES >> 20}")
    except ValueError as error:
        connection.sendall(REFUSED + str(error).encode(errors="replace"))
    else:
        connection.sendall(COMPILED + text)


def _limit(job: Job) -> float:
    """Limit the time and memory of this process, and disable its core dumps and output, which clients could make grow without limit.

    Returns the monotonic seconds at which the time begins. The client measures from there, to tell the two limits apart.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + job.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, job.timeout_s)
    return started


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
