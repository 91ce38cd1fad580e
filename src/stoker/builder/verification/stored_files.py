"""Reads the files of an engine back, and compares them with what was planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from stoker.base.errors import EngineError
from stoker.engine.config_file import rank_file_name
from stoker.engine.reader import Engine
from stoker.engine.safetensors_header import TensorLayouts
from stoker.engine.tensor_source import FileTensorSource


def verify_files(path: Path, layouts: list[TensorLayouts], progress: Callable[[int, int], None]) -> None:
    """Raise EngineError unless every file has its digest, and each rank's file contains exactly the tensors in its `layouts`."""
    engine = Engine.open(path, verify=True, progress=progress)
    for rank, planned in enumerate(layouts if engine.config.weights == "files" else []):
        file = path / rank_file_name(rank)
        entries = FileTensorSource(file, torch.device("cpu")).entries
        found = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
        if found != planned:
            different = sorted(set(found.items()) ^ set(planned.items()), key=str)[0]
            raise EngineError(
                f"{file} does not hold the tensors that were planned: {different}.", cure="Report this with the checkpoint's name."
            )
