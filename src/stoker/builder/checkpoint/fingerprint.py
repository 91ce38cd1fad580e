"""Identifies a checkpoint by content: a digest over the digests of its files, which are cached while the files do not change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.base import env
from stoker.base.cpus import num_cpus

CHUNK_BYTES = 64 << 20
MAX_THREADS = 8  # sha256 processes 1.4 GB/s per core, which is less than the page cache delivers


def fingerprint(files: Iterable[Path], progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """SHA-256 over the names and digests of `files`, in the order of their names. `progress` receives (bytes done, total bytes)."""
    total, done = hashlib.sha256(), 0
    ordered = sorted(set(files), key=lambda file: (file.name, file))
    pool = ThreadPoolExecutor(min(MAX_THREADS, num_cpus()))
    try:
        digests = [FileDigest(file, pool) for file in ordered]
        num_bytes = sum(len(digest.chunks) for digest in digests) * CHUNK_BYTES
        for digest in digests:
            for chunk in digest.chunks:
                chunk.result()
                done += CHUNK_BYTES
                progress(done, num_bytes)
            total.update(f"{digest.file.name} {digest.result()}\n".encode())
    finally:
        pool.shutdown(cancel_futures=True)
    return total.hexdigest()


class FileDigest:
    """The digest of a file: SHA-256 over the SHA-256 of each of its chunks, which a thread pool computes.

    It is cached in the cache directory under the file's path, size, inode and times of change. `chunks` is empty if the digest was cached.
    """

    def __init__(self, file: Path, pool: ThreadPoolExecutor) -> None:
        status = file.stat()
        key = f"{file.resolve()} {status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns} {CHUNK_BYTES}"
        self.file = file
        self._cache_file = env.cache_dir() / "digests" / hashlib.sha256(key.encode()).hexdigest()
        cached = self._cache_file.read_text() if self._cache_file.is_file() else ""
        self._digest = cached if len(cached) == 64 else ""  # a cache file of another length is incomplete
        self.chunks = [] if self._digest else [pool.submit(_sha256_chunk, file, at) for at in range(0, status.st_size, CHUNK_BYTES)]

    def result(self) -> str:
        """The digest in hexadecimal. Waits for the chunks to be hashed, and writes the cache file."""
        if not self._digest:
            self._digest = hashlib.sha256(b"".join(chunk.result() for chunk in self.chunks)).hexdigest()
            _write_cache_file(self._cache_file, self._digest)
        return self._digest


def _sha256_chunk(file: Path, start: int) -> bytes:
    """SHA-256 of the chunk at offset `start`, which may be shorter at the end of the file."""
    digest, buffer, left = hashlib.sha256(), memoryview(bytearray(1 << 20)), CHUNK_BYTES
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while left and (count := opened.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _write_cache_file(cache_file: Path, digest: str) -> None:
    """Write the cache file atomically. Errors are ignored, because they only cost time at the next build."""
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(cache_file)
    except OSError:
        pass
