"""An append-only log of what named keys used, for billing: one line of JSON per request.

A line is on the disk before the last part of its answer is sent, so nothing that a client has received completely is missing. A thread
writes and flushes all lines that have arrived together. Several processes append to the same file. If the file was renamed (log rotation),
a new one is created.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from pathlib import Path

import msgspec

from stoker.base.errors import ConfigError, UnavailableError
from stoker.base.logging import get_logger

log = get_logger(__name__)

RETRY_S = 1.0  # after a failed write, requests are refused for this time
MAX_LINE_BYTES = 1 << 16  # of a line that is read
_CLOSE = None


class UsageRecord(msgspec.Struct, frozen=True):
    """One line."""

    time: str  # of the end of the request, in UTC
    key: str  # the name of the key
    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, those that were reused
    completion_tokens: int
    outcome: str  # as in stoker_requests_total
    duration_s: float


class _Entry(msgspec.Struct):
    """A line to write, and the future of the request that waits for it."""

    line: bytes
    loop: asyncio.AbstractEventLoop
    written: asyncio.Future[None]


class UsageLog:
    """The file at `path`. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"usage_log={str(path)!r} cannot be opened: {error.strerror}.", cure="Name a file in a folder.") from None
        self._is_torn = not self._ends_with_line()  # the last line is incomplete
        self._failed_at: float | None = None
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # started with the first line

    def check(self) -> None:
        """Raise UnavailableError if the last write has failed less than RETRY_S ago."""
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_S:
            raise _not_written()

    def append(self, record: UsageRecord) -> asyncio.Future[None]:
        """Write a line. The future ends when it is on the disk, or with UnavailableError if it cannot be written."""
        loop = asyncio.get_running_loop()
        entry = _Entry(msgspec.json.encode(record) + b"\n", loop, loop.create_future())
        self._queue.put(entry)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
            self._thread.start()
        return entry.written

    def close(self) -> None:
        """Write what was appended, and close the file."""
        if self._thread is not None:
            self._queue.put(_CLOSE)
            self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        """The thread: write the entries that have arrived, until `close`."""
        closing = False
        while not closing:
            entries: list[_Entry] = []
            with contextlib.suppress(queue.Empty):
                item = self._queue.get()
                while True:
                    if item is _CLOSE:
                        closing = True
                    else:
                        entries.append(item)
                    item = self._queue.get_nowait()
            if entries:
                self._write_all(entries)

    def _write_all(self, entries: list[_Entry]) -> None:
        """Write lines together, and end their futures."""
        error: OSError | None = None
        try:
            self._write(b"".join(entry.line for entry in entries))
        except OSError as failure:
            error = failure
            if self._failed_at is None or time.monotonic() - self._failed_at > RETRY_S:
                log.error("%s cannot be written: %s; requests of named keys are refused.", self._path, failure.strerror)
        self._failed_at = time.monotonic() if error is not None else None
        for entry in entries:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                entry.loop.call_soon_threadsafe(_end, entry.written, error)

    def _write(self, data: bytes) -> None:
        """Append `data` to the file, or to a new one if it was renamed, and flush it to the disk. Raises OSError."""
        self._reopen_if_renamed()
        if self._is_torn:
            data = b"\n" + data
        self._is_torn = True
        while data:
            data = data[os.write(self._file, data) :]
        self._is_torn = False
        os.fdatasync(self._file)

    def _reopen_if_renamed(self) -> None:
        """Open the path again if it is not the open file any more."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return
        new = self._open()
        os.close(self._file)
        self._file, self._is_torn = new, not self._ends_with_line()

    def _ends_with_line(self) -> bool:
        """Whether the file is empty, not a regular file, or ends with a whole line."""
        if not self._path.is_file() or not (size := self._path.stat().st_size):
            return True
        with self._path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) == b"\n"

    def _open(self) -> int:
        """A descriptor that appends to the file."""
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _end(written: asyncio.Future[None], error: OSError | None) -> None:
    """End the future of a line."""
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(_not_written())
        written.exception()  # a request that has left does not retrieve it


def _not_written() -> UnavailableError:
    """The error of a request whose usage cannot be recorded."""
    return UnavailableError("The usage of the request cannot be recorded.", cure="See the server's log, and send it again.")


def read_tokens(path: Path | str, day: str, month: str) -> dict[str, tuple[int, int]]:
    """The tokens of each key in a day (2026-01-31) and a month (2026-01) by name.

    Incomplete lines are skipped. A file that does not exist, or is no regular file, has no tokens.
    """
    totals: dict[str, tuple[int, int]] = {}
    if not Path(path).is_file():
        return totals
    decoder = msgspec.json.Decoder(UsageRecord)
    with Path(path).open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            with contextlib.suppress(msgspec.MsgspecError):
                record = decoder.decode(line)
                if record.time.startswith(month):
                    number, (of_day, of_month) = record.prompt_tokens + record.completion_tokens, totals.get(record.key, (0, 0))
                    totals[record.key] = (of_day + number * record.time.startswith(day), of_month + number)
    return totals
