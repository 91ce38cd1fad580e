"""The tensors of a file that torch.save wrote. Pickles may contain tensors only; code in a pickle is not run."""

from __future__ import annotations

import contextlib
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, first_line
from stoker.base.private_api import check_private_api

_DOWNLOAD_AGAIN = "Download the file again."
_SAVE_AGAIN = "Use a checkpoint that transformers saved."
_LOCAL_HEADER = struct.Struct("<26xHH")  # the lengths of the name and of the extra field before the content of a zip record
_MAX_BYTE_ORDER = 16  # bytes
_DAMAGE = (
    RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, MemoryError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip


def storage_offset(tensor: Tensor) -> int | None:
    """The offset in its file of the storage of a tensor without data; None for a tensor that has its data."""
    found: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)  # set by torch.load under FakeTensorMode
    return found


def unpickle_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, without their data if the file is a zip.

    Raises CheckpointError when the pickle is damaged, contains code, or contains anything but tensors.
    """
    check_private_api("stoker.engine.pickled_tensors")
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        records = _stored_records(path) if _is_zip(path) else None
        with contextlib.nullcontext() if records is None else FakeTensorMode():
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        found = re.search(r"Unsupported (?:global|class|operand)[^\n]*?((?:\w+\.)+\w+)", str(problem))
        what = f" ({found[1]})" if found else ""
        message = f"{path} contains Python objects other than tensors{what} and is not read, because reading them would run their code."
        raise CheckpointError(message, cure="Use a safetensors checkpoint.") from None
    except _DAMAGE as problem:
        raise CheckpointError(f"{path} is damaged ({first_line(problem)}).", cure=_DOWNLOAD_AGAIN) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise CheckpointError(f"{path} is not a dictionary of tensors.", cure=_SAVE_AGAIN)
    for name, tensor in loaded.items():
        _check_tensor(f"{path}: tensor {name!r}", tensor, records)
    return loaded


def _check_tensor(what: str, tensor: Tensor, records: dict[int, int] | None) -> None:
    """Raise CheckpointError unless a tensor is dense, and all of its elements are in the file as they are.

    `records` has the sizes of the records of a zip by their offset. Tensors without data are not checked against them by torch.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
        kind = "a negated or conjugated view" if tensor.is_neg() or tensor.is_conj() else f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{what} is {kind}, and a dense CPU tensor is expected.", cure=_SAVE_AGAIN)
    if records is None:
        return
    num_bytes = records.get(storage_offset(tensor) or 0)
    if num_bytes is None:
        raise CheckpointError(f"{what} has no record where torch expects it in a file that it wrote.", cure=_SAVE_AGAIN)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = max((last + 1) * tensor.dtype.itemsize if tensor.numel() else 0, int(tensor.untyped_storage().nbytes()))
    if needed > num_bytes:
        raise CheckpointError(f"{what} needs {needed} bytes, and its record has {num_bytes}.", cure=_DOWNLOAD_AGAIN)


def _stored_records(path: Path) -> dict[int, int]:
    """The size of each record of a zip by the offset of its content.

    Raises CheckpointError for compressed records and big-endian numbers, whose bytes are not those of the tensors.
    """
    sizes, names = {}, set()
    with zipfile.ZipFile(path) as file, path.open("rb") as content:
        for record in file.infolist():
            name = record.filename.lower()  # torch finds records by names without regard to case
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size or record.flag_bits & 1:
                raise CheckpointError(f"{path} has a compressed record {record.filename[:60]!r}.", cure=_SAVE_AGAIN)
            if name in names:
                raise CheckpointError(f"{path} has two records {record.filename[:60]!r}.", cure=_DOWNLOAD_AGAIN)
            content.seek(record.header_offset)
            start = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(content.read(_LOCAL_HEADER.size)))
            if name.rpartition("/")[2] == "byteorder":
                content.seek(start)
                if (found := content.read(min(record.file_size, _MAX_BYTE_ORDER))) != b"little":
                    raise CheckpointError(f"{path} has the byte order {found!r}, and only little is supported.", cure=_SAVE_AGAIN)
            names.add(name)
            sizes[start] = record.file_size
    return sizes


def _is_zip(path: Path) -> bool:
    """Whether the file has the zip format of torch 1.6 and later."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
