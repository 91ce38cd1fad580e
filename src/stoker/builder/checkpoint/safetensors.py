"""Checkpoint weights in one safetensors file, or in the shards that an index lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint import chunked_file
from stoker.builder.checkpoint.chunked_file import ChunkedFile
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.engine.safetensors_header import TensorEntry, read_header
from stoker.engine.staging import StagingBuffers


class SafetensorsWeights(CheckpointWeights):
    """The tensors of safetensors files. Raises CheckpointError for a damaged file, and for a tensor that two files hold."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        for file in files:
            for name, entry in read_header(file, CheckpointError, DOWNLOAD_AGAIN).items():
                if name in self._entries:
                    raise CheckpointError(f"tensor {name!r} is in {self._entries[name][0]} and in {file}.", cure=DOWNLOAD_AGAIN)
                self._entries[name] = (file, entry)
        self.tensors = {name: TensorInfo(entry.shape, entry.dtype) for name, (_, entry) in self._entries.items()}
        self._opened = {file: ChunkedFile(file) for file in files}
        self._staging: StagingBuffers | None = None

    def chunks(self, name: str) -> Iterator[Tensor]:
        path, entry = self._entries[name]
        yield from self._opened[path].chunks(entry.start, entry.stop, entry.dtype)

    def range_chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        path, entry = self._entries[name]
        size = entry.dtype.itemsize
        yield from self._opened[path].chunks(entry.start + start * size, entry.start + stop * size, entry.dtype)

    def copy_into(self, name: str, out: Tensor) -> Iterator[Tensor]:
        """See `CheckpointWeights.copy_into`. If the dtypes agree, bytes are read directly into `out`, or through pinned memory."""
        path, entry = self._entries[name]
        if entry.dtype != out.dtype:
            yield from super().copy_into(name, out)
        elif not out.is_cpu:
            self._staging = self._staging or StagingBuffers()
            self._opened[path].copy_to_device(out, entry.start, self._staging)
            yield out
        else:
            step = chunked_file.CHUNK_BYTES
            for at in range(0, entry.stop - entry.start, step):
                part = out[at // out.itemsize : (at + step) // out.itemsize]
                self._opened[path].read_into(part.view(torch.uint8), entry.start + at)
                yield part

    def location(self, name: str) -> str:
        return f"{self._entries[name][0]}: {name}"
