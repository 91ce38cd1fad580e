"""Reads and writes the headers of safetensors files. A header is checked completely before any of its values are used.

Format (github.com/huggingface/safetensors, README): the length of the header as a little-endian u64, the header as JSON, then the bytes of
the tensors without gaps. `data_offsets` in the header count from the end of the header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from stoker.base.errors import StokerError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_NAME = 1024  # characters of a tensor name
MAX_AXES = 64
ALIGNMENT = 64  # bytes: offset of the first tensor, so that rows of whole cache lines are aligned when the file is mapped

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# (shape, dtype) of tensors by name, in file order.
TensorLayouts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a file, at bytes [start, stop) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The size of a tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


def encode_header(layouts: TensorLayouts, metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these tensors, padded so that the first tensor starts at a multiple of ALIGNMENT."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (shape, dtype) in layouts.items():
        stop = offset + num_bytes(shape, dtype)
        fields[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (offset, stop)}
        offset = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path, error: type[StokerError], cure: str) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name.

    Checks that the header is complete, that the size of each tensor agrees with its shape and dtype, and that the tensors fill the file
    exactly. Otherwise raises `error`, which names the file and the tensor and ends with `cure`.
    """
    data_start, raw = _read_raw_header(path, error, cure)
    entries = {name: _parse_entry(path, name, fields, data_start, error, cure) for name, fields in raw.items() if name != "__metadata__"}
    _check_filled(path, entries, data_start, error, cure)
    return entries


def read_metadata(path: Path, error: type[StokerError], cure: str) -> dict[str, str]:
    """The free-form strings in the header of a safetensors file. Raises `error` as `read_header` does."""
    _, raw = _read_raw_header(path, error, cure)
    metadata = raw.get("__metadata__", {})
    return {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _read_raw_header(path: Path, error: type[StokerError], cure: str) -> tuple[int, dict[str, Any]]:
    """(offset of the first tensor's bytes, the header as parsed JSON). Raises `error` for a header that is incomplete or too large."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise error(f"{path} is truncated or not a safetensors file: {size} bytes, header of {length}.", cure=cure)
        try:
            raw = json.loads(file.read(length))
        except (ValueError, RecursionError) as problem:
            raise error(f"{path}: the header is not JSON ({problem}).", cure=cure) from None
    if not isinstance(raw, dict):
        raise error(f"{path}: the header is not an object.", cure=cure)
    return 8 + length, raw


def _parse_entry(path: Path, name: str, fields: Any, data_start: int, error: type[StokerError], cure: str) -> TensorEntry:
    """The entry of one tensor. Raises `error` for a missing field, an unknown dtype or a size that does not agree with the shape."""
    try:
        dtype_name, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        numbers = (*shape, start, stop)
    except (KeyError, TypeError, ValueError):
        raise error(f"{path}: tensor {name!r} has no dtype, shape and data_offsets.", cure=cure) from None
    if len(name) > MAX_NAME:
        raise error(f"{path}: the tensor name {name[:60]!r} has {len(name)} characters, and the limit is {MAX_NAME}.", cure=cure)
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise error(f"{path}: tensor {name!r} has the unknown dtype {str(dtype_name)[:60]!r}.", cure=cure)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise error(f"{path}: tensor {name!r} has shape {str(shape)[:200]} at bytes {str(start)[:60]} to {str(stop)[:60]}.", cure=cure)
    # Libraries multiply the sizes of a tensor in 64 bits, in any order, also where another size is zero.
    if len(shape) > MAX_AXES or math.prod(max(n, 1) for n in shape) * DTYPES[dtype_name].itemsize >= 1 << 63:
        raise error(f"{path}: tensor {name!r} has shape {str(shape)[:200]}, which is too large.", cure=cure)
    if stop - start != num_bytes(shape, DTYPES[dtype_name]):
        raise error(f"{path}: tensor {name!r} of shape {shape} and dtype {dtype_name} has {stop - start} bytes.", cure=cure)
    return TensorEntry(DTYPES[dtype_name], shape, data_start + start, data_start + stop)


def _check_filled(path: Path, entries: dict[str, TensorEntry], data_start: int, error: type[StokerError], cure: str) -> None:
    """Raise `error` unless the tensors follow each other without gaps or overlaps, up to the end of the file."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise error(f"{path}: tensor {name!r} begins at byte {entry.start}, not at {end}.", cure=cure)
        end = entry.stop
    if (size := path.stat().st_size) != end:
        raise error(f"{path} is truncated or too long: {size} bytes, and the header describes {end}.", cure=cure)
