"""Checkpoint weights in pytorch_model.bin files, which are pickles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.chunked_file import ChunkedFile
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.engine.pickled_tensors import storage_offset, unpickle_tensors


class PickledWeights(CheckpointWeights):
    """The tensors of pytorch_model.bin files. Pickles may contain tensors only; code in a pickle is not run.

    A file is unpickled with fake tensors, which know their offset in the file; contents are then read in chunks. A file from before torch
    1.6 is a single pickle, and is read into memory as a whole.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._entries: dict[str, tuple[ChunkedFile, Tensor]] = {}
        for file in map(ChunkedFile, files):
            for name, tensor in unpickle_tensors(file.path).items():
                if name in self._entries:
                    raise CheckpointError(f"tensor {name!r} is in {self._entries[name][0].path} and in {file.path}.", cure=DOWNLOAD_AGAIN)
                self._entries[name] = (file, tensor)
        self.tensors = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, (_, tensor) in self._entries.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        file, tensor = self._entries[name]
        storage = tensor.untyped_storage()
        storage_start = storage_offset(tensor)
        if storage_start is None:
            yield tensor.flatten()
        elif tensor.is_contiguous():
            start = storage_start + int(tensor.storage_offset()) * tensor.dtype.itemsize
            yield from file.chunks(start, start + self.tensors[name].num_bytes, tensor.dtype)
        else:
            whole = torch.cat([chunk.clone() for chunk in file.chunks(storage_start, storage_start + int(storage.nbytes()), tensor.dtype)])
            yield whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()

    def location(self, name: str) -> str:
        return f"{self._entries[name][0].path}: {name}"
