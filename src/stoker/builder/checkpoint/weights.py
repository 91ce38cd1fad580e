"""The interface to the tensors of a checkpoint. Names, shapes and dtypes come from headers; contents are read in bounded chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.engine.safetensors_header import num_bytes
from stoker.quant.format import Format


class TensorInfo(msgspec.Struct, frozen=True):
    """Shape and dtype of a checkpoint tensor as `CheckpointWeights` returns it."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # float32 for tensors that are dequantized when they are read

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return num_bytes(self.shape, self.dtype)


class CheckpointWeights(ABC):
    """The tensors of a checkpoint, by name."""

    tensors: dict[str, TensorInfo]
    files: list[Path]  # the files that the tensors are read from
    input_factors: Mapping[str, str] = {}  # weight in `prequantized` whose input is multiplied first → the tensor [in] of the factors
    has_cache_scales: bool = False  # whether there are scales of an FP8 KV cache
    prequantized: Mapping[str, Format] = {}  # weights that are stored in few bits, and the format that holds them without a change

    @abstractmethod
    def chunks(self, name: str) -> Iterator[Tensor]:
        """The elements of a tensor in order, as flat chunks of bounded size. A chunk is overwritten when the next one is read."""

    def range_chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """The elements [start, stop) of a tensor, as flat chunks."""
        at = 0
        for chunk in self.chunks(name):
            first, last = max(start - at, 0), min(stop - at, chunk.numel())
            if first < last:
                yield chunk[first:last]
            at += chunk.numel()

    def copy_into(self, name: str, out: Tensor) -> Iterator[Tensor]:
        """Copy a tensor into `out`, a flat tensor of any dtype and device. Yields each part of `out` after it was filled."""
        done = 0
        for chunk in self.chunks(name):
            part = out[done : done + chunk.numel()]
            part.copy_(chunk)
            yield part
            done += chunk.numel()

    def read(self, name: str) -> Tensor:
        """The whole tensor in its own dtype."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=info.dtype)
        for _ in self.copy_into(name, out.view(-1)):
            pass
        return out

    def read_input_factors(self, name: str) -> Tensor:
        """The factors of a weight in `input_factors`, float32 [in]. `read` returns the weight multiplied by them. Raises KeyError."""
        return self.read(self.input_factors[name]).float()

    def read_prequantized(self, name: str) -> dict[str, Tensor]:
        """The stored tensors of a weight by suffix, in the format `prequantized[name]`. Raises KeyError for other weights."""
        raise KeyError(name)

    def location(self, name: str) -> str:
        """The file and the name of a tensor, for error messages."""
        return f"{self.files[0]}: {name}"


class NoWeights(CheckpointWeights):
    """The weights of a checkpoint that was opened for its config.json only. Reading one raises CheckpointError."""

    def __init__(self) -> None:
        self.tensors, self.files = {}, []

    def chunks(self, name: str) -> Iterator[Tensor]:
        raise CheckpointError(f"tensor {name!r} cannot be read: the checkpoint was opened without weights.", cure="Use --dummy-weights.")
