"""Checkpoint weights in pytorch_model.bin files, which are pickles."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, first_line
from stoker.base.private_api import check_private_api
from stoker.builder.checkpoint.chunked_file import ChunkedFile
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo


class PickledWeights(CheckpointWeights):
    """The tensors of pytorch_model.bin files. Pickles may contain tensors only; code in a pickle is not run.

    A file is unpickled with fake tensors, which know their offset in the file; contents are then read in chunks. A file from before torch
    1.6 is a single pickle, and is read into memory as a whole.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._entries: dict[str, tuple[ChunkedFile, Tensor]] = {}
        for file in map(ChunkedFile, files):
            for name, tensor in _unpickle_tensors(file.path).items():
                if name in self._entries:
                    raise CheckpointError(f"tensor {name!r} is in {self._entries[name][0].path} and in {file.path}.", cure=DOWNLOAD_AGAIN)
                self._entries[name] = (file, tensor)
        self.tensors = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, (_, tensor) in self._entries.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        file, tensor = self._entries[name]
        storage = tensor.untyped_storage()
        storage_start = getattr(storage, "_checkpoint_offset", None)  # set by torch.load under FakeTensorMode
        if storage_start is None:
            yield tensor.flatten()
        elif tensor.is_contiguous():
            start = storage_start + tensor.storage_offset() * tensor.dtype.itemsize
            yield from file.chunks(start, start + self.tensors[name].num_bytes, tensor.dtype)
        else:
            whole = torch.cat([chunk.clone() for chunk in file.chunks(storage_start, storage_start + storage.nbytes(), tensor.dtype)])
            yield whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()

    def location(self, name: str) -> str:
        return f"{self._entries[name][0].path}: {name}"


def _unpickle_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises CheckpointError when the pickle is damaged, contains code, or contains anything but tensors."""
    check_private_api("stoker.builder.checkpoint.pytorch_bin")
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode() if _is_zip(path) else contextlib.nullcontext():
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        found = re.search(r"Unsupported (?:global|class|operand)[^\n]*?((?:\w+\.)+\w+)", str(problem))
        what = f" ({found[1]})" if found else ""
        message = f"{path} contains Python objects other than tensors{what} and is not read, because reading them would run their code."
        raise CheckpointError(message, cure="Use a safetensors checkpoint.") from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError) as problem:
        raise CheckpointError(f"{path} is damaged ({first_line(problem)}).", cure=DOWNLOAD_AGAIN) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise CheckpointError(f"{path} is not a dictionary of tensors.", cure="Use a checkpoint that transformers saved.")
    for name, tensor in loaded.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            kind = f"tensor {name!r} is {tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{path}: {kind}, and a dense CPU tensor is expected.", cure="Use a checkpoint that transformers saved.")
    return loaded


def _is_zip(path: Path) -> bool:
    """Whether the file has the zip format of torch 1.6 and later."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
