"""Safetensors files: a header that is checked before anything is believed, and a writer that streams.

Format: u64 length, a JSON header, then the tensors' bytes without holes (github.com/huggingface/safetensors, README).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import StokerError

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
PINNED_BYTES, MOST_PIECES = 256 << 20, 8  # of tensors on their way from a device to files
ALIGNMENT = 64  # the first tensor's offset, so that rows of whole cache lines stay aligned when the file is mapped

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file: bytes [start, stop) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it was written."""

    size: int
    sha256: str


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def read_header(path: Path, error: type[StokerError], cure: str) -> dict[str, Entry]:
    """The tensors of a safetensors file by name.

    Raises `error`, naming file and tensor and ending with `cure`, unless the header is whole, every tensor's bytes agree with its shape and
    dtype, and together they fill the file exactly.
    """
    data, raw = _raw_header(path, error, cure)
    entries = {name: _entry(path, name, fields, data, error, cure) for name, fields in raw.items() if name != "__metadata__"}
    _check_filled(path, entries, data, error, cure)
    return entries


def read_metadata(path: Path, error: type[StokerError], cure: str) -> dict[str, str]:
    """The file's free-form notes. Raises `error` as `read_header` does."""
    _, raw = _raw_header(path, error, cure)
    notes = raw.get("__metadata__", {})
    return {str(key): str(value) for key, value in notes.items()} if isinstance(notes, dict) else {}


def _raw_header(path: Path, error: type[StokerError], cure: str) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and the header as it stands."""
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


def _entry(path: Path, name: str, fields: Any, data: int, error: type[StokerError], cure: str) -> Entry:
    try:
        code, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        numbers = (*shape, start, stop)
    except (KeyError, TypeError, ValueError):
        raise error(f"{path}: tensor {name!r} has no dtype, shape and data_offsets.", cure=cure) from None
    if not isinstance(code, str) or code not in DTYPES:
        raise error(f"{path}: tensor {name!r} has the unknown dtype {code!r}.", cure=cure)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise error(f"{path}: tensor {name!r} has shape {shape} at bytes {start} to {stop}.", cure=cure)
    if stop - start != num_bytes(shape, DTYPES[code]):
        raise error(f"{path}: tensor {name!r} of shape {shape} and dtype {code} has {stop - start} bytes.", cure=cure)
    return Entry(DTYPES[code], shape, data + start, data + stop)


def _check_filled(path: Path, entries: dict[str, Entry], data: int, error: type[StokerError], cure: str) -> None:
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise error(f"{path}: tensor {name!r} begins at byte {entry.start}, not at {end}.", cure=cure)
        end = entry.stop
    if (size := path.stat().st_size) != end:
        raise error(f"{path} is truncated or too long: {size} bytes where the header says {end}.", cure=cure)


def read_into(fd: int, out: memoryview, start: int) -> None:
    """Fill `out` from byte `start` of an open file. Raises EOFError when the file ends first."""
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], start + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {start + done}")
        done += count


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class TensorFileWriter:
    """Writes a safetensors file whose layout is known before its contents: tensors go out in the order of `layouts`, hashed on the way.

    One thread writes and one hashes what the caller made, while the caller makes what follows; what goes wrong there is raised by a later
    call. A tensor of a device comes over in pieces, through pinned memory of `pinned_bytes`.
    """

    def __init__(
        self, path: Path, layouts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str] | None = None,
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:  # fmt: skip
        self._layouts = dict(layouts)
        self._piece_bytes = max(pinned_bytes // MOST_PIECES, 1)
        self._pending = list(self._layouts)[::-1]
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._threads = {work: ThreadPoolExecutor(1, "weights") for work in (self._file.write, self._hash.update)}
        self._underway: deque[list[Future[Any]]] = deque()  # of each piece, the oldest first
        self._buffers: deque[Tensor] = deque()  # the one that was used longest ago first
        self._emit(_header(self._layouts, metadata or {}))

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor, which may not change after. Raises ValueError unless it is the layout's next one in shape and dtype."""
        expected = self._pending.pop() if self._pending else None
        if name != expected or (tuple(tensor.shape), tensor.dtype) != self._layouts[name]:
            got = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"tensor {got} was written where {expected} {self._layouts.get(expected or '')} belongs")
        if not tensor.numel():
            return
        if tensor.is_cpu:
            self._wait(0)  # so that two tensors are in memory at most
            self._emit(as_bytes(tensor.contiguous()))
        else:
            for part in tensor.contiguous().view(-1).view(torch.uint8).split(self._piece_bytes):
                self._emit(as_bytes(self._brought(part)))

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._file.close()

    def finish(self) -> FileRecord:
        """The file as it is now whole; `directory.publish` sees to the disk. Raises ValueError when tensors are missing."""
        if self._pending:
            raise ValueError(f"tensors were not written: {self._pending[::-1][:5]}")
        self._wait(0)
        self._file.flush()
        return FileRecord(self._file.tell(), self._hash.hexdigest())

    def _brought(self, part: Tensor) -> Tensor:
        """A device's bytes in the buffer whose last piece is written by now."""
        self._wait(MOST_PIECES - 1)
        is_new = len(self._buffers) < MOST_PIECES
        buffer = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True) if is_new else self._buffers.popleft()
        self._buffers.append(buffer)
        return buffer[: part.numel()].copy_(part)

    def _emit(self, data: bytes | memoryview) -> None:
        self._underway.append([thread.submit(work, data) for work, thread in self._threads.items()])

    def _wait(self, most: int) -> None:
        """Until so many pieces at most are underway."""
        while len(self._underway) > most:
            for work in self._underway.popleft():
                work.result()


def _header(layouts: dict[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (shape, dtype) in layouts.items():
        stop = offset + num_bytes(shape, dtype)
        fields[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (offset, stop)}
        offset = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
