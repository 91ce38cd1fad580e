"""Sources of the stored tensors of one rank: its file, or random numbers for engines that were built without weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import EngineError
from stoker.engine.safetensors_header import TensorEntry, read_header
from stoker.engine.staging import StagingBuffers
from stoker.quant.format import TensorSource

REBUILD = "Build the engine again."


class FileTensorSource(TensorSource):
    """The tensors of one rank file.

    On the CPU they are views of the mapped file, whose pages are private: writes stay in the process. For a device they are copied through
    pinned memory.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.device = device
        self.entries = read_header(path, EngineError, REBUILD)
        if device.type == "cpu":
            self._mapped: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        else:
            self._file = path.open("rb")
            self._staging = StagingBuffers()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor by name. Raises EngineError when it is missing, or has another shape or dtype."""
        entry = self.entries.get(name)
        if entry is None:
            raise EngineError(f"{self.path}: tensor {name!r} is missing.", cure=REBUILD)
        if (entry.shape, entry.dtype) != (tuple(shape), dtype):
            stored, wanted = f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}"
            raise EngineError(f"{self.path}: tensor {name!r} is {stored}, and {wanted} is expected.", cure=REBUILD)
        return self._view(entry) if self.device.type == "cpu" else self._copy(entry)

    def _copy(self, entry: TensorEntry) -> Tensor:
        """Read a tensor to the device."""
        out = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        try:
            self._staging.copy_from_file(out, self._file.fileno(), entry.start)
        except EOFError as problem:
            raise EngineError(f"{self.path} was truncated while it was read: {problem}.", cure=REBUILD) from None
        return out

    def _view(self, entry: TensorEntry) -> Tensor:
        """A view of the mapped file, or a copy if the tensor is not aligned."""
        flat = torch.empty(0, dtype=torch.uint8).set_(self._mapped)[entry.start : entry.stop]
        if entry.start % entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)


class DummyTensorSource(TensorSource):
    """Random tensors with which every linear computes finite numbers. A tensor depends on its name only, not on the order of calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random values: integers over their full range, small positive scales, norm weights near 1, and others near 0.

        Scales that are bytes are exponents of e8m0, here from 2 ** -17 to 2 ** -7.
        """
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            # Every bit pattern without the top exponent bit is a finite number below 2.
            bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=self.device)
            return bits.bitwise_and_(0xBF).view(dtype)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        if "scale" in name.rsplit(".", 1)[-1] and dtype == torch.uint8:
            return out.random_(110, 121, generator=generator)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            return out.random_(limits.min, limits.max, generator=generator)
        if "scale" in name.rsplit(".", 1)[-1]:
            return out.uniform_(1e-4, 4e-4, generator=generator)
        if len(shape) == 1 and name.endswith("norm.weight"):
            return out.normal_(1.0, 0.02, generator=generator)
        return out.normal_(0.0, 0.02, generator=generator)
