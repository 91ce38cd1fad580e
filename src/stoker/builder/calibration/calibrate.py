"""Calibration as the build runs it: token windows go through the checkpoint layer by layer, and each layer comes out quantized.

Finished layers are kept in the cache directory, so an interrupted calibration goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.base import env
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.builder.conversion.convert import convert, make
from stoker.builder.prepare import Prepared, measures
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import encode_model
from stoker.core.specs import LinearSpec, Spec
from stoker.distributed.group import SINGLE
from stoker.engine.layerwise import LayerStream
from stoker.engine.tensor_file import read_header
from stoker.kernels import ops
from stoker.kernels.types import AttentionParams, Rotary
from stoker.layers.decoder import kv_cache_specs, layer_specs
from stoker.layers.loader import Loader
from stoker.quant.calibration import CacheStats, TensorTable, check_counts, quantize_layer, record
from stoker.quant.format import TensorSource
from stoker.quant.recipe import AS_STORED, Recipe, encode
from stoker.quant.stats import InputStats

log = get_logger(__name__)


class CheckpointSource(TensorSource):
    """A checkpoint's tensors under their engine names, dense, on a device."""

    def __init__(self, prepared: Prepared, device: torch.device) -> None:
        self.prepared = prepared
        self.device = device

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        prepared = self.prepared
        return make(prepared.makings[name], prepared.checkpoint.weights, prepared.config.model, dtype, self.device)


class RecordingLoader(Loader):
    """Loads linears that count their inputs into `stats` when their format of `recipe` wants calibration; all are dense."""

    def __init__(self, source: TensorSource, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(source, Recipe(), dtype, device, SINGLE)
        self.formats = recipe
        self.stats: dict[str, InputStats] = {}

    def linear(self, spec: LinearSpec) -> Any:
        loaded = super().linear(spec)
        wanted = self.formats.format_for(spec).needs_calibration
        return record(loaded, spec, self.device, self.stats) if wanted else loaded


class CacheLoader(Loader):
    """Loads layers whose attention shows `stats` what it reads."""

    def __init__(self, source: TensorSource, recipe: Recipe, dtype: torch.dtype, device: torch.device, stats: CacheStats) -> None:
        super().__init__(source, recipe, dtype, device, SINGLE)
        self.stats = stats

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams
    ) -> Tensor:
        q = ops.rope_store(q, k, v, *rotary, cache, batch.slots)
        self.stats.add(q, cache.keys, cache.values)
        return ops.attention(q, cache, batch, params)


def needs_calibration(prepared: Prepared) -> bool:
    """Whether something of the build is measured."""
    config = prepared.config
    return config.weights == "files" and measures(config.model, config.recipe)


def forget(prepared: Prepared) -> None:
    """Remove what calibrations of this build left in the cache: the engine is there. What other processes are at stays."""
    if not needs_calibration(prepared):
        return
    for lock in sorted(_directory(prepared).glob("*.lock")):
        with contextlib.suppress(Timeout), FileLock(lock, timeout=0, is_singleton=True):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: another process
        _directory(prepared).rmdir()


def _directory(prepared: Prepared) -> Path:
    """Of one checkpoint and all that decides what its layers become; the text comes on top."""
    config = prepared.config
    key = [config.stoker_version, config.checkpoint.fingerprint, config.dtype, encode(config.recipe), encode_model(config.model)]
    return env.cache_dir() / "calibration" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def work_device(prepared: Prepared) -> torch.device:
    """The target's kind of device where this machine has one."""
    return torch.device("cuda" if prepared.config.target.device == "cuda" and torch.cuda.is_available() else "cpu")


@torch.inference_mode()
def calibrate(prepared: Prepared, tokens: list[Tensor], progress: Callable[[str, int, int], None]) -> Calibrated:
    """Quantize every layer by what `tokens` (windows of ids) make of it."""
    config, device = prepared.config, work_device(prepared)
    state = State(prepared, tokens)
    stream = LayerStream(config.model, tokens)
    dense = Loader(CheckpointSource(prepared, device), Recipe(), getattr(torch, config.dtype), device, SINGLE)
    if (resumed := state.resume()) is not None:
        stream.layer, stream.hidden = resumed
    else:
        stream.begin(dense)
    while stream.layer < config.model.num_layers:
        progress("calibrate", stream.layer, config.model.num_layers)
        index = stream.layer
        stored = _layer(prepared, stream, dense)
        state.save(index, stored, stream.hidden)
    progress("calibrate", stream.layer, config.model.num_layers)
    return Calibrated(state)


def _layer(prepared: Prepared, stream: LayerStream, dense: Loader) -> dict[str, Tensor]:
    """The stored tensors of the stream's next layer, which it then passes as quantized."""
    config, recipe, index = prepared.config.model, prepared.config.recipe, stream.layer
    specs = layer_specs(config, index)
    if recipe.name == AS_STORED:
        checkpoint, makings = prepared.checkpoint.weights, prepared.makings
        taken = (convert(spec, makings, checkpoint, config, recipe, dense.dtype) for spec in specs.values())
        return _passed(prepared, stream, dense, {name: tensor.to(dense.device) for found in taken for name, tensor in found})
    weights = {name: tensor for spec in specs.values() for name, tensor in dense_tensors(spec, dense).items()}
    recorder = RecordingLoader(TensorTable(weights), recipe, dense.dtype, dense.device)
    if any(recipe.format_for(spec).needs_calibration for spec in specs.values() if isinstance(spec, LinearSpec)):
        stream.advance(recorder, keep=True)
        check_counts(recorder.stats)
    stored = quantize_layer(config.layers[index], f"layers.{index}", specs, recipe, weights, recorder.stats)
    return _passed(prepared, stream, dense, stored)


def _passed(prepared: Prepared, stream: LayerStream, dense: Loader, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors of a layer which the stream has passed, with what its cache needs if that is quantized."""
    config, recipe, index = prepared.config.model, prepared.config.recipe, stream.layer
    plain = msgspec.structs.replace(recipe, kv_cache=None)
    if recipe.kv_cache is None:
        stream.advance(Loader(TensorTable(stored), plain, dense.dtype, dense.device, SINGLE))
        return stored
    attention = config.layers[index].attention
    stats = CacheStats(attention, recipe.kv_cache, stream.tables(dense.device).get(attention.rope))
    stream.advance(CacheLoader(TensorTable(stored), plain, dense.dtype, dense.device, stats))
    found = stats.tensors()
    return stored | {spec.name: found[key] for key, spec in kv_cache_specs(config, index, recipe.kv_cache).items()}


def dense_tensors(spec: Spec, loader: Loader) -> dict[str, Tensor]:
    """A spec's tensors before quantization, by full name."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: loader.tensor(spec)}
    tensors = {f"{spec.name}.weight": loader.source.get(f"{spec.name}.weight", spec.weight_shape, loader.dtype)}
    if spec.bias:
        tensors[f"{spec.name}.bias"] = loader.source.get(f"{spec.name}.bias", spec.bias_shape, loader.dtype)
    return tensors


class State:
    """What a calibration has finished, in a directory of the cache that belongs to this checkpoint, recipe and text.

    A process that finds another one at it begins a directory of its own.
    """

    def __init__(self, prepared: Prepared, tokens: list[Tensor]) -> None:
        text = hashlib.sha256(b"".join(window.numpy().tobytes() for window in tokens)).hexdigest()
        _directory(prepared).mkdir(parents=True, exist_ok=True)
        if not self._claim(_directory(prepared) / text):
            self._claim(_directory(prepared) / f"{text}-{socket.gethostname()}-{os.getpid()}")
        self.path.mkdir(exist_ok=True)

    def _claim(self, path: Path) -> bool:
        """Whether the directory is this process's from now on."""
        self.path, self._lock = path, FileLock(f"{path}.lock", timeout=0, is_singleton=True)
        with contextlib.suppress(Timeout):
            self._lock.acquire()
        return self._lock.is_locked

    def resume(self) -> tuple[int, list[Tensor]] | None:
        """(the next layer, the hidden states before it), or None: nothing is there, or not whole."""
        found = sorted(self.path.glob("hidden-*.safetensors"))
        if not found:
            return None
        index = int(found[-1].stem.rpartition("-")[2])
        try:
            hidden = load_file(found[-1])
            for i in range(index):
                read_header(self._layer(i), EngineError, "")
            return index, [hidden[str(i)] for i in range(len(hidden))]
        except (SafetensorError, EngineError, OSError, KeyError) as problem:
            log.warning("a calibration that was interrupted begins anew: %s", problem)
            return None

    def save(self, index: int, stored: dict[str, Tensor], hidden: list[Tensor]) -> None:
        self._write(f"layer-{index}", {name: tensor.cpu() for name, tensor in stored.items()})
        self._write(f"hidden-{index + 1:06}", {str(i): tensor for i, tensor in enumerate(hidden)})
        (self.path / f"hidden-{index:06}.safetensors").unlink(missing_ok=True)

    def layer(self, index: int) -> dict[str, Tensor]:
        return load_file(self._layer(index))

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index}.safetensors"

    def _write(self, stem: str, tensors: dict[str, Tensor]) -> None:
        fresh = self.path / f"{stem}.new"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh)
        fresh.replace(self.path / f"{stem}.safetensors")


class Calibrated:
    """The stored tensors of finished layers, one layer in memory at a time."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._index, self._layer = -1, dict[str, Tensor]()

    def __contains__(self, name: str) -> bool:
        return name.startswith("layers.")

    def __getitem__(self, name: str) -> Tensor:
        index = int(name.split(".")[1])
        if index != self._index:
            self._index, self._layer = index, self.state.layer(index)
        return self._layer[name]
