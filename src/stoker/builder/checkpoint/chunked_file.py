"""A file from which tensors are read in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.engine.byte_io import as_bytes, read_into
from stoker.engine.staging import StagingBuffers

CHUNK_BYTES = 16 << 20


class ChunkedFile:
    """An open file of a checkpoint.

    It is read instead of mapped, because the pages of a mapped file count as memory of this process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("rb")

    def chunks(self, start: int, stop: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """The bytes start : stop as flat tensors of at most CHUNK_BYTES. All chunks use the same buffer: each overwrites the one before."""
        buffer = torch.empty(min(CHUNK_BYTES, stop - start), dtype=torch.uint8)
        for at in range(start, stop, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, stop - at)]
            self.read_into(part, at)
            yield part.view(dtype)

    def read_into(self, out: Tensor, start: int) -> None:
        """Fill a contiguous CPU tensor with the bytes from offset `start`. Raises CheckpointError when the file ends first."""
        with self._truncation_as_error():
            read_into(self._file.fileno(), as_bytes(out), start)

    def copy_to_device(self, out: Tensor, start: int, staging: StagingBuffers) -> None:
        """Fill a contiguous device tensor with the bytes from offset `start`. Raises CheckpointError when the file ends first."""
        with self._truncation_as_error():
            staging.copy_from_file(out, self._file.fileno(), start)

    @contextlib.contextmanager
    def _truncation_as_error(self) -> Iterator[None]:
        """Convert an EOFError in the block to a CheckpointError that names the file."""
        try:
            yield
        except EOFError as problem:
            raise CheckpointError(f"{self.path} is truncated: {problem}.", cure=DOWNLOAD_AGAIN) from None
