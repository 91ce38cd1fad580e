"""Writes a safetensors file as a stream, hashed while it is written."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.engine.byte_io import as_bytes
from stoker.engine.file_record import FileRecord
from stoker.engine.safetensors_header import TensorLayouts, encode_header

PINNED_BYTES = 256 << 20  # pinned memory for tensors that are copied from a device
MAX_CHUNKS = 8  # chunks in pinned memory at the same time


class SafetensorsWriter:
    """Writes a safetensors file whose tensors are known in advance by name, shape and dtype.

    Tensors are written in the order of `layouts`. One thread writes and another one hashes what the caller produced, while the caller
    produces the next tensor; an exception in a thread is raised by a later call. Device tensors are copied in chunks through `pinned_bytes`
    of pinned memory.
    """

    def __init__(
        self,
        path: Path,
        layouts: TensorLayouts,
        metadata: Mapping[str, str] | None = None,
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:
        self._layouts = dict(layouts)
        self._chunk_bytes = max(pinned_bytes // MAX_CHUNKS, 1)
        self._pending = list(self._layouts)[::-1]
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._threads = {work: ThreadPoolExecutor(1, "weights") for work in (self._file.write, self._hash.update)}
        self._in_flight: deque[list[Future[Any]]] = deque()  # the write and the hash of each chunk, oldest first
        self._buffers: deque[Tensor] = deque()  # pinned buffers, least recently used first
        self._emit(encode_header(self._layouts, metadata or {}))

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor, whose content must not change afterwards.

        Raises ValueError unless name, shape and dtype are those of the next layout.
        """
        expected = self._pending.pop() if self._pending else None
        if name != expected or (tuple(tensor.shape), tensor.dtype) != self._layouts[name]:
            got = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"tensor {got} was written in place of {expected} {self._layouts.get(expected or '')}")
        if not tensor.numel():
            return
        if tensor.is_cpu:
            self._wait(0)  # so that at most two tensors are in memory
            self._emit(as_bytes(tensor.contiguous()))
        else:
            for chunk in tensor.contiguous().view(-1).view(torch.uint8).split(self._chunk_bytes):
                self._emit(as_bytes(self._copy_to_host(chunk)))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._file.close()

    def finish(self) -> FileRecord:
        """Wait until everything is written, and return the record of the file, which is not flushed to the disk yet.

        Raises ValueError when tensors are missing.
        """
        if self._pending:
            raise ValueError(f"tensors were not written: {self._pending[::-1][:5]}")
        self._wait(0)
        self._file.flush()
        return FileRecord(self._file.tell(), self._hash.hexdigest())

    def _copy_to_host(self, chunk: Tensor) -> Tensor:
        """Copy device bytes to a pinned buffer, after the chunk that used the buffer before has been written."""
        self._wait(MAX_CHUNKS - 1)
        is_new = len(self._buffers) < MAX_CHUNKS
        buffer = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True) if is_new else self._buffers.popleft()
        self._buffers.append(buffer)
        return buffer[: chunk.numel()].copy_(chunk)

    def _emit(self, data: bytes | memoryview) -> None:
        """Start to write and to hash the next bytes of the file."""
        self._in_flight.append([thread.submit(work, data) for work, thread in self._threads.items()])

    def _wait(self, most: int) -> None:
        """Wait until at most `most` chunks are in flight."""
        while len(self._in_flight) > most:
            for work in self._in_flight.popleft():
                work.result()
