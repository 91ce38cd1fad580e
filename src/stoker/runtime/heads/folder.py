"""Reads the directory of a head checkpoint: config.json, and safetensors files or pickles. Everything in it is checked before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.base.json_object import read_bounded_object
from stoker.core.packed_weight import PackedWeight
from stoker.engine.byte_io import as_bytes, read_into
from stoker.engine.pickled_tensors import storage_offset, unpickle_tensors
from stoker.engine.safetensors_header import TensorEntry, read_header
from stoker.kernels.reference.quant_fp8 import widen_blocks
from stoker.models.stacked_experts import expert_parts

FP8_BLOCK = 128  # rows and columns that share a scale in the FP8 checkpoints of DeepSeek V3
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")  # names that SafeAILab (EAGLE) and FasterDecoding (Medusa) use
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
DOWNLOAD_AGAIN = "Download the heads again."
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HeadFolder:
    """The config.json and the tensors of a directory. Tensor names are those that `rename` makes of the names in the files."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, tuple[Path, TensorEntry]]) -> None:
        self.path, self.config = path, config
        self._tensors = tensors
        self._used: set[str] = set()

    @staticmethod
    def open(path: Path) -> HeadFolder:
        """Open a directory. Raises CheckpointError when config.json or the weights are missing or damaged."""
        config = _read_object(path / "config.json", MAX_CONFIG_BYTES)
        tensors: dict[str, tuple[Path, TensorEntry]] = {}
        for file in _weight_files(path):
            for name, entry in _read_entries(file).items():
                if name in tensors:
                    raise CheckpointError(f"tensor {name!r} is in {tensors[name][0]} and in {file}.", cure=DOWNLOAD_AGAIN)
                tensors[name] = (file, entry)
        return HeadFolder(path, config, tensors)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._tensors)

    def renamed(self, rename: Callable[[str], str | None]) -> HeadFolder:
        """A view with other names; tensors for which `rename` returns None are left out. Raises CheckpointError for equal names."""
        found: dict[str, tuple[Path, TensorEntry]] = {}
        for name, entry in self._tensors.items():
            if (new := rename(name)) is None:
                continue
            if new in found:
                raise CheckpointError(f"{self.path}: two tensors have the meaning of {new!r}.", cure=DOWNLOAD_AGAIN)
            found[new] = entry
        return HeadFolder(self.path, self.config, found)

    def with_single_experts(self) -> HeadFolder:
        """The same tensors, of which those with stacked experts are replaced by their linears."""
        found: dict[str, tuple[Path, TensorEntry]] = {}
        for name, (file, entry) in self._tensors.items():
            size, parts = entry.dtype.itemsize, expert_parts(name, entry.shape)
            for part in parts:
                if part.name in self._tensors:
                    raise CheckpointError(f"{self.path}: {part.name!r} is stored twice, also in {name!r}.", cure=DOWNLOAD_AGAIN)
                start = entry.start + part.first * size
                found[part.name] = file, TensorEntry(entry.dtype, part.shape, start, start + part.shape[0] * part.shape[1] * size)
            if not parts:
                found[name] = file, entry
        return HeadFolder(self.path, self.config, found)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises CheckpointError if there is none of this name."""
        return self._entry(name)[1].shape

    def read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """A floating-point tensor in `dtype`, on the CPU. Block-quantized FP8 weights are dequantized.

        Raises CheckpointError if it is missing, or has another shape or dtype.
        """
        found = self._read(name, shape)
        if found.dtype is torch.float8_e4m3fn and f"{name}_scale_inv" in self._tensors:
            scale = self._read(f"{name}_scale_inv", None)
            expected = tuple(-(-size // FP8_BLOCK) for size in found.shape)
            if scale.shape != expected or scale.dtype is not torch.float32:
                raise CheckpointError(f"{self.path}: {name}_scale_inv is not float32 {list(expected)}.", cure=DOWNLOAD_AGAIN)
            blocks = PackedWeight("fp8", found, scale, group_size=FP8_BLOCK, block_rows=FP8_BLOCK)
            return widen_blocks(blocks).to(dtype)
        if found.dtype not in _FLOATS:
            raise CheckpointError(f"{self.path}: tensor {name!r} is {found.dtype}.", cure="Use heads in float32, float16 or bfloat16.")
        return found.to(dtype)

    def read_integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An integer tensor as int64, on the CPU. Raises CheckpointError if it is missing, or has another shape or dtype."""
        found = self._read(name, shape)
        if found.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{self.path}: tensor {name!r} is {found.dtype}, and whole numbers are expected.", cure=DOWNLOAD_AGAIN)
        return found.long()

    def ignore(self, *names: str) -> None:
        """Declare that tensors are not needed."""
        self._used.update(names)

    def check_all_used(self) -> None:
        """Raise CheckpointError naming a tensor that was neither read nor ignored: heads with unknown parts would draft wrongly."""
        unused = sorted(set(self._tensors) - self._used)
        if unused:
            raise CheckpointError(
                f"{self.path}: tensor {unused[0]!r} would not be used{f', and {len(unused) - 1} others' if unused[1:] else ''}.",
                cure="Heads of this variant are not supported.",
            )

    def _entry(self, name: str) -> tuple[Path, TensorEntry]:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing.", cure=DOWNLOAD_AGAIN)
        return self._tensors[name]

    def _read(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """A tensor as it is stored."""
        file, entry = self._entry(name)
        if shape is not None and entry.shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {list(entry.shape)}, and {list(shape)} is expected.",
                cure="Use heads that were trained for this model.",
            )
        self._used.add(name)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        if out.numel():
            with file.open("rb") as opened:
                read_into(opened.fileno(), as_bytes(out), entry.start)
        return out


def _read_object(file: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist.", cure="Name a directory with the config.json and the weights of the heads.")
    return read_bounded_object(file, limit, CheckpointError, DOWNLOAD_AGAIN)


def _weight_files(path: Path) -> Iterable[Path]:
    """The safetensors files of a directory: those of its index, or else all; without any, the pickles that publishers of heads name so.

    Raises CheckpointError if there are none.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = _read_object(index, MAX_INDEX_BYTES).get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) and all(isinstance(v, str) for v in listed.values()) else []
        if not names or any(Path(name).name != name or not (path / name).is_file() for name in names):
            raise CheckpointError(f"{index} does not list files next to it.", cure=DOWNLOAD_AGAIN)
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files and (pickles := [path / name for name in PICKLES if (path / name).is_file()]):
        return pickles[:1]
    if not files:
        other = next((file.name for pattern in WEIGHT_FILES[1:] for file in path.glob(pattern)), None)
        problem = f"{other} is not a name of weights of heads" if other else "it has no *.safetensors file"
        raise CheckpointError(f"{path}: {problem}.", cure=f"Use heads in safetensors files, or in {' or '.join(PICKLES)}.")
    return files


def _read_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file or a pickle. Raises CheckpointError for a pickle that contains more than tensors."""
    if file.suffix == ".safetensors":
        return read_header(file, CheckpointError, DOWNLOAD_AGAIN)
    return {name: _pickled_entry(file, name, tensor) for name, tensor in unpickle_tensors(file).items()}


def _pickled_entry(file: Path, name: str, tensor: Tensor) -> TensorEntry:
    """Where a tensor of a pickle is stored. Raises CheckpointError for one whose elements are not in one piece of the file."""
    start = storage_offset(tensor)
    if start is None or not tensor.is_contiguous():
        problem = "was written by a torch before 1.6" if start is None else f"stores {name!r} in another order"
        command = f"import torch, safetensors.torch as s; s.save_file({{k: t.contiguous() for k, t in torch.load('{file.name}').items()}}, "
        raise CheckpointError(f"{file} {problem}.", cure=f"Convert it: python -c \"{command}'model.safetensors')\"")
    start += int(tensor.storage_offset()) * tensor.dtype.itemsize
    stop = start + tensor.numel() * tensor.dtype.itemsize
    if stop > file.stat().st_size:
        raise CheckpointError(f"{file} was truncated: {name!r} ends at byte {stop}.", cure=DOWNLOAD_AGAIN)
    return TensorEntry(tensor.dtype, tuple(tensor.shape), start, stop)
