"""A parsed GGUF file: its metadata as plain values, and the location of its tensors."""

from __future__ import annotations

import math
import mmap
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


class GGUFFile:
    """Metadata and tensors of a GGUF file, under GGUF names. Raises CheckpointError for a damaged file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = _parse(path)

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


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """(metadata, tensors) of a file. Raises CheckpointError for a damaged file."""
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
            tensors[raw.name] = _located(raw, header.data_start, size)
        return header.metadata, tensors
    except ValueError as problem:
        raise CheckpointError(f"{path} is not a complete GGUF file ({problem}).", cure=DOWNLOAD_AGAIN) from None


def _located(raw: RawTensor, data_start: int, file_size: int) -> GGUFTensor:
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
    return GGUFTensor(kind, tuple(reversed(raw.dims)), data_start + raw.offset, num_bytes)
