"""The table of GGUF architectures: collects the rows of `architectures/` and finds the one of a file."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.base.registry import nearest
from stoker.builder.checkpoint.gguf import architectures
from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN

_QUANTIZATION_VERSION = 2  # of the layout of blocks (GGML_QNT_VERSION)


def _collect() -> dict[str, GGUFArchitecture]:
    """Import every module of `architectures/`. The rows by name."""
    modules = pkgutil.iter_modules(architectures.__path__, f"{architectures.__name__}.")
    return {row.name: row for module in modules for row in importlib.import_module(module.name).ARCHITECTURES}


ARCHITECTURES = _collect()


def find_architecture(file: GGUFFile) -> GGUFArchitecture:
    """The row of a file. Raises CheckpointError for an architecture that is not in the table."""
    _check_kind_of_file(file)
    name: str = file.get("general.architecture", str, "")
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name in ("clip", "mmproj"):
        cure = "It holds the image encoder of a model. Name the file with the language model."
    else:
        near = nearest(name, list(ARCHITECTURES))
        meant = f"If it is misspelled, it is {' or '.join(near)}. " if near else ""
        cure = f"{meant}The {len(ARCHITECTURES)} supported ones are listed in docs/architectures.md."
    raise CheckpointError(f"{file.path}: GGUF architecture {name!r} is not supported.", cure=cure)


def _check_kind_of_file(file: GGUFFile) -> None:
    """Raise CheckpointError for a file that holds no model, or blocks in a layout of before 2023."""
    kind, version = file.get("general.type", str, "model"), file.get("general.quantization_version", int, _QUANTIZATION_VERSION)
    if kind not in ("model", "mmproj"):  # mmproj is reported by its architecture
        raise CheckpointError(f"{file.path}: general.type={kind!r} is not supported.", cure="Name the file with the language model.")
    if version != _QUANTIZATION_VERSION:
        cure = f"Only {_QUANTIZATION_VERSION} is: convert the model again."
        raise CheckpointError(f"{file.path}: general.quantization_version={version} is not supported.", cure=cure)


def read_model_data(row: GGUFArchitecture, m: Metadata) -> dict[str, Any]:
    """The data of a config.json that describes the model, without dtype and token ids.

    Raises CheckpointError for metadata that is missing, of a wrong type, or not used.
    """
    try:
        data = row.read_config(m)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError, IndexError) as problem:
        what = f"{m.file.path}: the metadata does not describe a model of {row.name}"
        raise CheckpointError(f"{what} ({type(problem).__name__}: {str(problem)[:80]}).", cure=DOWNLOAD_AGAIN) from None
    m.check_all_used(row.ignored_keys)
    return {"model_type": row.model_types[0], **data}
