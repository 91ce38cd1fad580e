"""The tensors of a checkpoint: names, shapes and dtypes from the headers, contents in bounded chunks."""

from __future__ import annotations

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import FETCH, read_json
from stoker.engine.staging import Staging
from stoker.engine.tensor_file import Entry, as_bytes, num_bytes, read_header, read_into
from stoker.quant.format import Format

CHUNK_BYTES = 16 << 20


class Stored(msgspec.Struct, frozen=True):
    """A tensor as the checkpoint holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of what `chunks` gives: float32 for blocks that are widened

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


class Weights(ABC):
    """Tensors by name. `files` are what they are read from."""

    stored: dict[str, Stored]
    files: list[Path]
    kept: Mapping[str, Format] = {}  # weights stored in few bits, and the format of quant/ that holds them without change

    @abstractmethod
    def chunks(self, name: str) -> Iterator[Tensor]:
        """The tensor's elements in order, in flat pieces of about CHUNK_BYTES. A piece is valid until the next one is asked for."""

    def fill(self, name: str, out: Tensor) -> Iterator[Tensor]:
        """Put the tensor's elements into `out`, flat, in its dtype and on its device; gives each part of it that is done."""
        done = 0
        for piece in self.chunks(name):
            part = out[done : done + piece.numel()]
            part.copy_(piece)
            yield part
            done += piece.numel()

    def read(self, name: str) -> Tensor:
        """The whole tensor, in its stored dtype."""
        entry = self.stored[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        for _ in self.fill(name, out.view(-1)):
            pass
        return out

    def take(self, name: str) -> dict[str, Tensor]:
        """A weight of `kept` as its format stores it: tensors by suffix."""
        raise KeyError(name)

    def locate(self, name: str) -> str:
        """Where a tensor is, for messages."""
        return f"{self.files[0]}: {name}"


class NoWeights(Weights):
    """A config.json alone."""

    def __init__(self) -> None:
        self.stored, self.files = {}, []

    def chunks(self, name: str) -> Iterator[Tensor]:
        raise CheckpointError(f"tensor {name!r} is asked of a checkpoint without weights.", cure="Use --dummy-weights.")


class SafetensorsWeights(Weights):
    """One file, or the shards of an index. Read, not mapped: the pages of a mapped file would count as this process's memory."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._where: dict[str, tuple[Path, Entry]] = {}
        for file in files:
            for name, entry in read_header(file, CheckpointError, FETCH).items():
                if name in self._where:
                    raise CheckpointError(f"tensor {name!r} is in {self._where[name][0]} and in {file}.", cure=FETCH)
                self._where[name] = (file, entry)
        self.stored = {name: Stored(entry.shape, entry.dtype) for name, (_, entry) in self._where.items()}
        self._open = {file: _File(file) for file in files}
        self._staging: Staging | None = None

    def chunks(self, name: str) -> Iterator[Tensor]:
        path, entry = self._where[name]
        yield from self._open[path].pieces(entry.start, entry.stop, entry.dtype)

    def fill(self, name: str, out: Tensor) -> Iterator[Tensor]:
        path, entry = self._where[name]
        if entry.dtype != out.dtype:
            yield from super().fill(name, out)
            return
        if not out.is_cpu:
            self._staging = self._staging or Staging()
            self._open[path].send(out, entry.start, self._staging)
            yield out
            return
        for at in range(0, entry.stop - entry.start, CHUNK_BYTES):
            part = out[at // out.itemsize : (at + CHUNK_BYTES) // out.itemsize]
            self._open[path].read(part.view(torch.uint8), entry.start + at)
            yield part

    def locate(self, name: str) -> str:
        return f"{self._where[name][0]}: {name}"


class PickledWeights(Weights):
    """pytorch_model.bin files, with only tensors allowed in the pickle.

    The pickle is read with fake tensors, which know where in the file their bytes are; those are then read like safetensors'. Files from
    before torch 1.6 are one pickle and are held whole.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._where: dict[str, tuple[_File, Tensor]] = {}
        for file in map(_File, files):
            for name, tensor in _load_pickle(file.path).items():
                if name in self._where:
                    raise CheckpointError(f"tensor {name!r} is in {self._where[name][0].path} and in {file.path}.", cure=FETCH)
                self._where[name] = (file, tensor)
        self.stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, (_, tensor) in self._where.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        file, tensor = self._where[name]
        storage = tensor.untyped_storage()
        start = getattr(storage, "_checkpoint_offset", None)
        if start is None:
            yield tensor.flatten()
        elif tensor.is_contiguous():
            first = start + tensor.storage_offset() * tensor.dtype.itemsize
            yield from file.pieces(first, first + self.stored[name].num_bytes, tensor.dtype)
        else:
            whole = torch.cat([piece.clone() for piece in file.pieces(start, start + storage.nbytes(), tensor.dtype)])
            yield whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()

    def locate(self, name: str) -> str:
        return f"{self._where[name][0].path}: {name}"


class _File:
    """A file that tensors are read from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("rb")

    def pieces(self, start: int, stop: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Bytes [start, stop) as flat tensors of about CHUNK_BYTES; each is overwritten by the next."""
        buffer = torch.empty(min(CHUNK_BYTES, stop - start), dtype=torch.uint8)
        for at in range(start, stop, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, stop - at)]
            self.read(part, at)
            yield part.view(dtype)

    def read(self, out: Tensor, start: int) -> None:
        """Fill `out` with the bytes from `start` on."""
        with self._whole():
            read_into(self._file.fileno(), as_bytes(out), start)

    def send(self, out: Tensor, start: int, staging: Staging) -> None:
        """The same for a tensor of a device."""
        with self._whole():
            staging.fill(out, self._file.fileno(), start)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except EOFError as problem:
            raise CheckpointError(f"{self.path} is truncated: {problem}.", cure=FETCH) from None


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises CheckpointError for code in the pickle, damage, or anything but tensors."""
    try:
        with FakeTensorMode() if _is_zip(path) else contextlib.nullcontext():
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        message = f"{path} holds more than tensors and is not unpickled ({reason(problem)})."
        raise CheckpointError(message, cure="Use a safetensors checkpoint.") from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError) as problem:
        raise CheckpointError(f"{path} is damaged ({reason(problem)}).", cure=FETCH) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise CheckpointError(f"{path} is not a dictionary of tensors.", cure="Use a checkpoint that transformers saved.")
    for name, tensor in loaded.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            what = f"tensor {name!r} is {tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{path}: {what}, not plain numbers.", cure="Use a checkpoint that transformers saved.")
    return loaded


def reason(problem: Exception) -> str:
    """What a library's exception says, in one line."""
    return next(iter(str(problem).splitlines()), type(problem).__name__).rstrip(".")


def _is_zip(path: Path) -> bool:
    """Whether torch wrote the file since 1.6."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def open_weights(path: Path) -> Weights:
    """The weights of a checkpoint directory: safetensors before pickles, an index before a single file."""
    for stem, suffix, kind in (("model", ".safetensors", SafetensorsWeights), ("pytorch_model", ".bin", PickledWeights)):
        index, single = path / f"{stem}{suffix}.index.json", path / f"{stem}{suffix}"
        if index.is_file():
            return _check_index(kind(_shards(index)), index)
        if single.is_file():
            return kind([single])
    others = sorted(file for file in path.glob("*.safetensors") if file.name != "consolidated.safetensors")
    if len(others) == 1:
        return SafetensorsWeights(others)
    wanted = "model.safetensors, model.safetensors.index.json, pytorch_model.bin or its index"
    raise CheckpointError(f"{path} has no weights: none of {wanted}.", cure="Download them, or build with --dummy-weights.")


def _shards(index: Path) -> list[Path]:
    """The files an index names, each beside it."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not an index: it has no weight_map.", cure=FETCH) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it.", cure=FETCH)
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing.", cure=FETCH)
    return [index.parent / name for name in names]


def _check_index(weights: Weights, index: Path) -> Weights:
    listed = set(read_json(index)["weight_map"])
    for name in sorted(listed - set(weights.stored)):
        raise CheckpointError(f"{index} lists tensor {name!r}, which no shard holds.", cure=FETCH)
    return weights
