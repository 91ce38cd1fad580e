"""Parses the header of a GGUF file (versions 2 and 3, little-endian): metadata values and tensor records.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the gguf library keeps several arrays for each element of
an array of strings: 262,144 tokens with their merges take it 70 s and 1.2 GB, and this parser 0.5 s and 25 MB, on the same busy core. Every
count is checked against the bytes that are left before anything is allocated by it.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np

MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
_MAX_KEY_BYTES = 1 << 16
_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6

# Metadata value type → numpy dtype, for types of a fixed size.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"), 5: np.dtype("<i4"),
    _FLOAT32: np.dtype("<f4"), _BOOL: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class RawTensor:
    """One tensor record: name, dimensions as stored (columns first), number of the block type, and offset from the data section."""

    __slots__ = ("dims", "kind", "name", "offset")

    def __init__(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> None:
        self.name, self.dims, self.kind, self.offset = name, dims, kind, offset


class Header:
    """The parsed header: `metadata` by key, `tensors` in file order, and `data_start`, the offset of the data section.

    Raises ValueError for a file that is not GGUF, is truncated, or contradicts itself. `data` is the whole file, such as a memory map. The
    methods parse the next value.
    """

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = memoryview(data)
        self._at = 0
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._u32()
        if version not in (2, 3):
            order = ": it is big-endian" if version & 0xFFFF == 0 else ""
            raise ValueError(f"version {version} is not supported{order}")
        num_tensors, num_values = self._u64(), self._u64()
        self._check_count(num_tensors, 24, "tensors")
        self._check_count(num_values, 13, "metadata values")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string(_MAX_KEY_BYTES)
            if key in self.metadata:
                raise ValueError(f"the metadata {key[:80]!r} exists twice")
            self.metadata[key] = self._value(self._u32())
        self.tensors = [self._tensor() for _ in range(num_tensors)]
        self.data_start = self._aligned(self._at)

    def _tensor(self) -> RawTensor:
        """Read the description of one tensor. Raises ValueError for more than MAX_DIMENSIONS dimensions."""
        name, num_dims = self._string(_MAX_KEY_BYTES), self._u32()
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name[:80]!r} has {num_dims} dimensions")
        dims = tuple(self._u64() for _ in range(num_dims))
        return RawTensor(name, dims, self._u32(), self._u64())

    def _aligned(self, at: int) -> int:
        """`at` rounded up to the file's alignment. Raises ValueError for an invalid alignment."""
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"general.alignment={alignment!r} is not a number of bytes")
        return -(-at // alignment) * alignment

    def _value(self, kind: int) -> Any:
        """A metadata value of type number `kind`."""
        if kind == _STRING:
            return self._string(len(self._data))
        if kind == _ARRAY:
            return self._array()
        return self._numbers(kind, 1)[0]

    def _array(self) -> list[Any]:
        """Read an array of numbers or strings. Raises ValueError for an array of arrays."""
        kind, count = self._u32(), self._u64()
        if kind == _ARRAY:
            raise ValueError("an array of arrays is not supported")
        if kind != _STRING:
            return self._numbers(kind, count)
        self._check_count(count, 8, "strings")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """`count` strings. This loop is fast, because a vocabulary has hundreds of thousands of strings."""
        data, at, size_of, end = self._data, self._at, _U64.unpack_from, len(self._data)
        strings = []
        for _ in range(count):
            if at + 8 > end:
                raise ValueError("it ends within a string")
            stop = at + 8 + size_of(data, at)[0]
            if stop > end:
                raise ValueError("it ends within a string")
            strings.append(str(data[at + 8 : stop], "utf-8"))
            at = stop
        self._at = at
        return strings

    def _numbers(self, kind: int, count: int) -> list[Any]:
        """`count` numbers or booleans. A float32 becomes the shortest decimal that rounds to it: 1e-05 instead of 9.999999747378752e-06."""
        if kind not in _NUMBERS:
            raise ValueError(f"{kind} is not a type of metadata")
        dtype = _NUMBERS[kind]
        self._check_count(count, dtype.itemsize, "numbers")
        values = np.frombuffer(bytes(self._take(count * dtype.itemsize)), dtype)
        if kind == _BOOL:
            values = values.astype(bool)
        if kind == _FLOAT32 and count == 1:
            return [float(str(values[0]))]
        plain: list[Any] = values.tolist()
        return plain

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Raise ValueError if `count` values of at least `min_bytes` bytes do not fit into the rest of the file."""
        if count > (len(self._data) - self._at) // min_bytes:
            raise ValueError(f"it claims {count} {what}, which do not fit into its {len(self._data)} bytes")

    def _string(self, max_bytes: int) -> str:
        """Read a string. Raises ValueError if it has more than `max_bytes` bytes or is not UTF-8."""
        size = self._u64()
        if size > max_bytes:
            raise ValueError(f"a string claims {size} bytes")
        return str(self._take(size), "utf-8")

    def _take(self, size: int) -> memoryview:
        """The next `size` bytes. Raises ValueError at the end of the file."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"it ends within its header, at byte {len(self._data)}")
        return self._data[start : self._at]

    def _u32(self) -> int:
        """Read an unsigned number of 32 bits."""
        value: int = _U32.unpack(self._take(4))[0]
        return value

    def _u64(self) -> int:
        """Read an unsigned number of 64 bits."""
        value: int = _U64.unpack(self._take(8))[0]
        return value
