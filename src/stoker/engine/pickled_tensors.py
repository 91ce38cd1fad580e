"""The tensors of a file that torch.save wrote. Pickles may contain tensors only; code in a pickle is not run."""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, first_line
from stoker.base.private_api import check_private_api

_DOWNLOAD_AGAIN = "Download the file again."


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
        with FakeTensorMode() if _is_zip(path) else contextlib.nullcontext():
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        found = re.search(r"Unsupported (?:global|class|operand)[^\n]*?((?:\w+\.)+\w+)", str(problem))
        what = f" ({found[1]})" if found else ""
        message = f"{path} contains Python objects other than tensors{what} and is not read, because reading them would run their code."
        raise CheckpointError(message, cure="Use a safetensors checkpoint.") from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError) as problem:
        raise CheckpointError(f"{path} is damaged ({first_line(problem)}).", cure=_DOWNLOAD_AGAIN) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise CheckpointError(f"{path} is not a dictionary of tensors.", cure="Use a checkpoint that transformers saved.")
    for name, tensor in loaded.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            kind = f"tensor {name!r} is {tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{path}: {kind}, and a dense CPU tensor is expected.", cure="Use a checkpoint that transformers saved.")
    return loaded


def _is_zip(path: Path) -> bool:
    """Whether the file has the zip format of torch 1.6 and later."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
