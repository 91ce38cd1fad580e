"""A parsed GGUF file: its metadata as plain values, and the location of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from stoker.base.errors import CheckpointError
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
    """The reader of the gguf library holds four arrays per token of the vocabulary, so its values are copied and it is released."""
    try:
        reader = gguf.GGUFReader(path)
        tensors = {
            t.name: GGUFTensor(t.tensor_type, tuple(int(n) for n in reversed(t.shape)), t.data_offset, t.n_bytes) for t in reader.tensors
        }
        return {name: _plain_value(field) for name, field in reader.fields.items()}, tensors
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not a complete GGUF file ({problem}).", cure=DOWNLOAD_AGAIN) from None


def _plain_value(field: gguf.ReaderField) -> Any:
    """A metadata value. A float32 becomes the shortest decimal that rounds to it: 1e-05 instead of 9.999999747378752e-06."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types == [gguf.GGUFValueType.FLOAT32] else value
