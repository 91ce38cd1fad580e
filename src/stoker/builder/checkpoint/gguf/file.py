"""A parsed GGUF file: its metadata as plain values, and the location of its tensors. A file may be split into parts."""

from __future__ import annotations

import math
import mmap
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import msgspec

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.header import Header, RawTensor
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN


class GGUFTensor(msgspec.Struct, frozen=True):
    """Location and type of a tensor in the file."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # before quantization, rows first
    offset: int  # of its bytes in the file
    num_bytes: int
    part: int = 0  # index of the file, if the model is split

    def row(self, index: int) -> GGUFTensor:
        """The part of the tensor at `index` along its first axis."""
        num_bytes = self.num_bytes // self.shape[0]
        return GGUFTensor(self.kind, self.shape[1:], self.offset + index * num_bytes, num_bytes, self.part)


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """The first file of a model that is split into parts, for the path of any of them; otherwise `path`."""
    found = _PART.fullmatch(path.name)
    return path.with_name(f"{found[1]}-00001-of-{found[3]}.gguf") if found else path


class GGUFFile:
    """Metadata and tensors of a GGUF file, under GGUF names, with those of its further parts.

    `path` is the file, or any part of a split one. Raises CheckpointError for a damaged file, and for a part that is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = first_part(path)
        self.paths = [self.path]
        if not self.path.is_file():
            raise CheckpointError(f"{path} is a part of a split file, and {self.path.name} is missing.", cure="Download it, too.")
        self.metadata, self.tensors = _parse(self.path)
        if (count := self.get("split.count", int, 0)) > 1:
            self._add_parts(count)

    def _add_parts(self, count: int) -> None:
        """Add the tensors of the `count` - 1 other parts. Raises CheckpointError when they do not belong together."""
        found = _PART.fullmatch(self.path.name)
        if found is None or int(found[3]) != count or self.get("split.no", int, 0) != 0:
            cure = f"Name its first part as llama.cpp does: NAME-00001-of-{count:05}.gguf." if count < 100000 else DOWNLOAD_AGAIN
            raise CheckpointError(f"{self.path} is one of {count} parts of a split file.", cure=cure)
        for i in range(1, count):
            path = self.path.with_name(f"{found[1]}-{i + 1:05}-of-{count:05}.gguf")
            if not path.is_file():
                raise CheckpointError(f"{self.path} is split into {count} parts, and {path.name} is missing.", cure="Download it, too.")
            metadata, tensors = _parse(path, i)
            if (metadata.get("split.no"), metadata.get("split.count")) != (i, count) or self.tensors.keys() & tensors.keys():
                raise CheckpointError(f"{path} is not part {i + 1} of {self.path.name}.", cure=DOWNLOAD_AGAIN)
            self.paths.append(path)
            self.tensors |= tensors
        total = self.get("split.tensors.count", int, len(self.tensors))
        if total != len(self.tensors):
            problem = f"{self.path}: its parts have {len(self.tensors)} tensors, and split.tensors.count={total}"
            raise CheckpointError(f"{problem}.", cure=DOWNLOAD_AGAIN)

    def get(self, key: str, kind: type | list[type], default: Any = None) -> Any:
        """A metadata value, or `default`. `[kind]` means an array of values. Raises CheckpointError for a value of another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        element_type = kind[0] if isinstance(kind, list) else kind
        elements = value if isinstance(value, list) else [value]
        if isinstance(value, list) != isinstance(kind, list) or any(type(element) is not element_type for element in elements):
            expected = f"an array of {element_type.__name__}" if isinstance(kind, list) else element_type.__name__
            raise CheckpointError(f"{self.path}: the metadata {key}={str(value)[:60]} is not {expected}.", cure=DOWNLOAD_AGAIN)
        return value


def _parse(path: Path, part: int = 0) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """(metadata, tensors) of a file, which is number `part` of a split one. Raises CheckpointError for a damaged file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise ValueError("it is empty")
            header = Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # unmapped with the last reference
        tensors: dict[str, GGUFTensor] = {}
        for raw in header.tensors:
            if raw.name in tensors:
                raise ValueError(f"the tensor {raw.name[:80]!r} exists twice")
            tensors[raw.name] = _located(raw, header.data_start, size, part)
        _check_apart(tensors)
        return header.metadata, tensors
    except ValueError as problem:
        raise CheckpointError(f"{path} is not a complete GGUF file ({problem}).", cure=DOWNLOAD_AGAIN) from None


def _check_apart(tensors: dict[str, GGUFTensor]) -> None:
    """Raise ValueError when two tensors share bytes, with which a small file would describe a large model."""
    in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (name, tensor), (following, other) in pairwise(in_order):
        if other.offset < tensor.offset + tensor.num_bytes:
            where = f"byte {other.offset}, before the end of {name[:80]!r} at byte {tensor.offset + tensor.num_bytes}"
            raise ValueError(f"the tensor {following[:80]!r} begins at {where}")


def _located(raw: RawTensor, data_start: int, file_size: int, part: int) -> GGUFTensor:
    """The location and type of a tensor record. Raises ValueError when its bytes are not in the file or its type is unknown."""
    try:
        kind = gguf.GGMLQuantizationType(raw.kind)
    except ValueError:
        raise ValueError(f"the tensor {raw.name[:80]!r} has the unknown type {raw.kind}") from None
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if raw.dims[0] % block_values or 0 in raw.dims:
        raise ValueError(f"the tensor {raw.name[:80]!r} of shape {raw.dims} is not made of blocks of {block_values}")
    num_bytes = math.prod(raw.dims) // block_values * block_bytes
    if raw.offset + num_bytes > file_size - data_start:
        raise ValueError(f"the tensor {raw.name[:80]!r} ends at byte {data_start + raw.offset + num_bytes} of {file_size}")
    return GGUFTensor(kind, tuple(reversed(raw.dims)), data_start + raw.offset, num_bytes, part)
