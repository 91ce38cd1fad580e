"""Saves finished layers in the cache directory, so that an interrupted calibration continues where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.base import env
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.core.model_config import encode_model
from stoker.engine.config import EngineConfig
from stoker.engine.safetensors_header import read_header
from stoker.quant.recipe import encode_recipe

log = get_logger(__name__)


def calibration_folder(config: EngineConfig) -> Path:
    """The cache folder of one checkpoint and of all settings that determine the quantized layers, except for the text."""
    key = [config.stoker_version, config.checkpoint.fingerprint, config.dtype, encode_recipe(config.recipe), encode_model(config.model)]
    return env.cache_dir() / "calibration" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def discard_folder(folder: Path) -> None:
    """Remove the saved layers in a calibration folder. Layers that another process is using remain."""
    for lock in sorted(folder.glob("*.lock")):
        with contextlib.suppress(Timeout), FileLock(lock, timeout=0, is_singleton=True):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process uses the folder
        folder.rmdir()


class SavedLayers:
    """The layers that a calibration has finished, and the hidden states after the last of them.

    They are in a directory for the text in the calibration folder. If another process is calibrating with the same text, this one uses a
    directory of its own.
    """

    def __init__(self, folder: Path, tokens: list[Tensor]) -> None:
        text = hashlib.sha256(b"".join(window.numpy().tobytes() for window in tokens)).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        if not self._lock_directory(folder / text):
            self._lock_directory(folder / f"{text}-{socket.gethostname()}-{os.getpid()}")
        self.path.mkdir(exist_ok=True)

    def resume(self) -> tuple[int, list[Tensor]] | None:
        """(index of the next layer, its input for each window); None when nothing was saved, or it is damaged."""
        saved = sorted(self.path.glob("hidden-*.safetensors"))
        if not saved:
            return None
        index = int(saved[-1].stem.rpartition("-")[2])
        try:
            hidden = load_file(saved[-1])
            for i in range(index):
                read_header(self._layer_file(i), EngineError, "")
            return index, [hidden[str(i)] for i in range(len(hidden))]
        except (SafetensorError, EngineError, OSError, KeyError) as problem:
            log.warning("an interrupted calibration starts again, because its files are damaged: %s", problem)
            return None

    def save(self, index: int, stored: dict[str, Tensor], hidden: list[Tensor]) -> None:
        """Save the stored tensors of layer `index` and its output for each window, which replaces the output of the layer before."""
        self._write(f"layer-{index}", {name: tensor.cpu() for name, tensor in stored.items()})
        self._write(f"hidden-{index + 1:06}", {str(i): tensor for i, tensor in enumerate(hidden)})
        (self.path / f"hidden-{index:06}.safetensors").unlink(missing_ok=True)

    def load_layer(self, index: int) -> dict[str, Tensor]:
        """The stored tensors of a finished layer, with their engine names."""
        return load_file(self._layer_file(index))

    def _lock_directory(self, path: Path) -> bool:
        """Try to lock the directory `path` for this process. Returns whether it succeeded."""
        self.path, self._lock = path, FileLock(f"{path}.lock", timeout=0, is_singleton=True)
        with contextlib.suppress(Timeout):
            self._lock.acquire()
        return self._lock.is_locked

    def _layer_file(self, index: int) -> Path:
        """The file with the stored tensors of a layer."""
        return self.path / f"layer-{index}.safetensors"

    def _write(self, stem: str, tensors: dict[str, Tensor]) -> None:
        """Write a safetensors file atomically."""
        temporary = self.path / f"{stem}.new"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.replace(self.path / f"{stem}.safetensors")


class CalibratedTensors:
    """The stored tensors of all layers after calibration. One layer is in memory at a time."""

    def __init__(self, saved: SavedLayers) -> None:
        self.saved = saved
        self._index, self._layer = -1, dict[str, Tensor]()

    def __contains__(self, name: str) -> bool:
        return name.startswith("layers.")

    def __getitem__(self, name: str) -> Tensor:
        index = int(name.split(".")[1])
        if index != self._index:
            self._index, self._layer = index, self.saved.load_layer(index)
        return self._layer[name]
