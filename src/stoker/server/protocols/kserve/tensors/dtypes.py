"""KServe's data types, and the conversion of tensors between raw bytes, JSON and numpy arrays (BYTES: arrays of bytes objects)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stoker.server.protocols.kserve.errors import TritonError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16
    "BYTES": np.dtype("O"),
}
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 28
MAX_STRINGS = 1 << 13  # of a BYTES tensor, because 20,000 words are tokenized per second
STEP = 1 << 16  # numbers that are converted by one call
_LENGTH_BYTES = 4  # size of the length before each element of a BYTES tensor


def kserve_name(declared: str) -> str:
    """KServe's data type for the dtype of a model config. They are equal, except that STRING is BYTES."""
    return "BYTES" if declared == "STRING" else declared


def dtype_name(array: np.ndarray) -> str:
    """KServe's data type of an array. BF16 is reported as UINT16, because numpy has no such dtype."""
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape as a tuple. Raises TritonError unless it is a short list of whole numbers with a valid product."""
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMS or any(type(dim) is not int or dim < 0 for dim in shape):
        raise TritonError(f"invalid shape for input {name}: it must be a list of at most {MAX_DIMS} whole numbers from 0")
    if math.prod(dim or 1 for dim in shape) > MAX_ELEMENTS:  # numpy multiplies the other dims even if one is 0
        raise TritonError(f"invalid shape for input {name}: {list(shape)} has more than {MAX_ELEMENTS} elements")
    return tuple(shape)


def from_raw(name: str, dtype: str, shape: tuple[int, ...], raw: bytes | memoryview, model: str) -> np.ndarray:
    """The tensor of raw bytes. Raises TritonError if their number does not match the shape."""
    if dtype == "BYTES":
        return _from_raw_bytes(name, shape, raw)
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if len(raw) != size:
        raise TritonError(f"input byte size mismatch for input '{name}' for model '{model}'. Expected {size}, got {len(raw)}")
    return np.frombuffer(raw, DTYPES[dtype]).reshape(shape)


def _from_raw_bytes(name: str, shape: tuple[int, ...], raw: bytes | memoryview) -> np.ndarray:
    """The BYTES tensor of raw data: each element is preceded by its length (u32, little-endian)."""
    items: list[bytes] = []
    _check_count(expected := math.prod(shape))
    at, end = 0, len(raw)
    while at < end and len(items) <= expected:
        if end - at < _LENGTH_BYTES:
            raise TritonError(
                f"incomplete string length indicator for inference input '{name}', expecting {_LENGTH_BYTES} bytes but only {end - at} "
                "bytes available. Please make sure the string length indicator is in one buffer."
            )
        length = int.from_bytes(raw[at : at + _LENGTH_BYTES], "little")
        at += _LENGTH_BYTES
        if end - at < length:
            raise TritonError(
                f"incomplete string data for inference input '{name}', expecting string of length {length} but only {end - at} bytes "
                "available. Please make sure the string length is in one buffer."
            )
        items.append(bytes(raw[at : at + length]))
        at += length
    if len(items) != expected:
        raise TritonError(f"unexpected number of string elements {len(items)} for inference input '{name}', expecting {expected}")
    return text_array(items, shape)


def _check_count(count: int) -> None:
    """Raise TritonError for a BYTES tensor with too many strings."""
    if count > MAX_STRINGS:
        raise TritonError(f"a BYTES tensor has {count} strings, and the limit is {MAX_STRINGS}")


def text_array(items: Iterable[bytes], shape: tuple[int, ...]) -> np.ndarray:
    """The BYTES tensor of these elements."""
    array = np.empty(math.prod(shape), object)
    array[:] = list(items)
    return array.reshape(shape)


def to_raw(array: np.ndarray) -> bytes:
    """The raw bytes of a tensor; `from_raw` is the inverse."""
    if array.dtype != object:
        return array.tobytes()
    return b"".join([len(item).to_bytes(_LENGTH_BYTES, "little") + item for item in array.flat])


_ACCESS = "attempt to access JSON"
_JSON_TYPES = {  # kind of numpy dtype → (JSON types, Triton's message for others)
    "i": ((int,), f"Unable to parse 'data': {_ACCESS} non-signed-integer as signed-integer"),
    "u": ((int,), f"Unable to parse 'data': {_ACCESS} non-unsigned-integer as unsigned-integer"),
    "f": ((int, float), f"Unable to parse 'data': {_ACCESS} non-number as double"),
    "b": ((bool,), f"Unable to parse 'data': {_ACCESS} non-boolean as boolean"),
    "O": ((str,), f"Unable to parse JSON bytes array: {_ACCESS} non-string as string"),
}


def from_json(dtype: str, shape: tuple[int, ...], data: list[Any]) -> np.ndarray:
    """The tensor of a flat or nested JSON list. Raises TritonError, with status 500 for a wrong JSON type, as Triton."""
    flat = _flatten(data)
    kind = DTYPES[dtype]
    types, message = _JSON_TYPES[kind.kind]
    if not all(set(map(type, step)).issubset(types) for step in _steps(flat)):
        raise TritonError(message, 500)
    if len(flat) != math.prod(shape):
        raise TritonError("Unable to parse 'data': Shape does not match true shape of 'data' field", 500)
    if kind.kind == "O":
        _check_count(len(flat))
        return text_array([_utf8(item) for item in flat], shape)
    if kind.kind == "u" and flat and min(flat) < 0:
        raise TritonError(message, 500)
    try:
        return _numbers(flat, kind).reshape(shape)
    except OverflowError:
        raise TritonError(f"Unable to parse 'data': a number does not fit {dtype}", 500) from None


def _numbers(flat: list[Any], kind: np.dtype) -> np.ndarray:
    """The elements of a flat list as an array [count] of this dtype. Raises OverflowError for an integer that does not fit."""
    first = kind if kind.kind != "f" else np.dtype(np.float64)
    array = np.concatenate([np.empty(0, first), *(np.array(step, first) for step in _steps(flat))])
    with np.errstate(over="ignore"):  # numbers beyond the range become infinite
        return array.astype(kind, copy=False)


def _steps(flat: list[Any]) -> Iterator[list[Any]]:
    """The parts of a list. One call that processed all of a long list would hold the interpreter lock for too long."""
    yield from (flat[at : at + STEP] for at in range(0, len(flat), STEP)) if len(flat) > STEP else (flat,)


def to_json(array: np.ndarray) -> list[Any]:
    """A flat list, as in Triton. Bytes that are not UTF-8 are replaced; clients that need them request binary data."""
    if array.dtype != object:
        values: list[Any] = array.ravel().tolist()
        return values
    return [item.decode("utf-8", "replace") for item in array.flat]


def _flatten(data: Any) -> list[Any]:
    """The values of a nested list in one list."""
    if not isinstance(data, list):
        raise TritonError(f"Unable to parse 'data': {_ACCESS} non-array as array", 500)
    flat = data
    for _ in range(MAX_DIMS):
        if not any(type(item) is list for item in flat):
            return flat
        flat = [inner for item in flat for inner in (item if type(item) is list else [item])]
    raise TritonError(f"Unable to parse 'data': lists are nested deeper than {MAX_DIMS}", 500)


def _utf8(text: str) -> bytes:
    """The bytes of a text from JSON, which may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")
