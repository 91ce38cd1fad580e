"""Reads the weights of an engine into the page cache while its processes still import, so that a cold start is limited by the disk."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path

from stoker.base.errors import ConfigError, EngineError
from stoker.base.nodes import NodeSettings, place_ranks
from stoker.engine.config_file import engine_file, rank_file_name, read_summary

READERS = 8
# One thread reads a chunk, unless its last byte is cached: the first ones may be because the system has read ahead from the chunk before.
CHUNK_BYTES = 16 << 20
READ_BYTES = 1 << 20
MAX_SHARE = 0.5  # of the available memory that the files may take; more would replace each other in the page cache


class WeightPrefetch:
    """Threads that read the files of this node's ranks. Files that are cached already are not read, and errors are left to the load."""

    def __init__(self, engine: Path, nodes: NodeSettings = NodeSettings()) -> None:
        self.threads: list[threading.Thread] = []
        files = _weight_files(engine, nodes)
        sizes = [file.stat().st_size for file in files]
        if not files or sum(sizes) > MAX_SHARE * available_bytes():
            return
        chunks: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        # The ranks read their files from the beginning at the same time.
        offsets = ((at, file) for at in range(0, max(sizes), CHUNK_BYTES) for file in range(len(files)) if at < sizes[file])
        for at, file in offsets:
            chunks.put((file, at))
        for _ in range(READERS):
            self.threads.append(threading.Thread(target=_read, args=(files, chunks), name="prefetch", daemon=True))
            self.threads[-1].start()


def available_bytes() -> int:
    """The memory that programs can use without swapping; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page of a file at `offset` is in the page cache; if not, the system may begin to read it.

    Raises OSError if the file system cannot tell.
    """
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def _weight_files(engine: Path, nodes: NodeSettings) -> list[Path]:
    """The files of the ranks of this node; none for what is not an engine, which the checks of the start report."""
    try:
        summary = read_summary(engine)
        placement = place_ranks(summary.mapping, nodes.num_nodes)
    except (EngineError, ConfigError, OSError):
        return []
    if summary.weights != "files":
        return []
    return [engine_file(engine, rank_file_name(rank)) for rank, node in enumerate(placement) if node == nodes.node_rank]


def _read(files: list[Path], chunks: queue.SimpleQueue[tuple[int, int]]) -> None:
    """A thread: read the chunks (index of a file, offset) that are not cached until there are no more."""
    buffer = bytearray(READ_BYTES)
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, queue.Empty):
        opened = [stack.enter_context(file.open("rb", buffering=0)) for file in files]
        while True:
            index, start = chunks.get_nowait()
            fd = opened[index].fileno()
            end = min(start + CHUNK_BYTES, os.fstat(fd).st_size)
            if not is_cached(fd, end - 1):
                for offset in range(start, end, READ_BYTES):
                    os.preadv(fd, [buffer], offset)
