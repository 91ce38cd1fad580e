"""Loaders whose layers record the data for calibration: the inputs of linears, and the queries, keys and values of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.builder.conversion.convert import Converter
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.specs import LinearSpec, Spec
from stoker.distributed.group import SINGLE
from stoker.kernels import ops
from stoker.kernels.types import AttentionParams, Rotary
from stoker.layers.loader import Loader
from stoker.quant.calibration.cache_stats import CacheStats
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.calibration.recorder import record_inputs
from stoker.quant.format import TensorSource
from stoker.quant.recipe import Recipe


class CheckpointTensorSource(TensorSource):
    """The tensors of a checkpoint under their engine names, before quantization, on the converter's device."""

    def __init__(self, converter: Converter) -> None:
        self.converter = converter

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called `name`, before quantization, in `dtype`."""
        return self.converter.dense_tensor(name, dtype)


class InputRecordingLoader(Loader):
    """Loads dense linears. If the format of a linear in `recipe` needs calibration, statistics of its inputs are added to `stats`."""

    def __init__(self, source: TensorSource, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(source, Recipe(), dtype, device, SINGLE)
        self.formats = recipe
        self.stats: dict[str, InputStats] = {}

    def linear(self, spec: LinearSpec) -> Any:
        """A linear, wrapped if its inputs are recorded."""
        loaded = super().linear(spec)
        needs_calibration = self.formats.format_for(spec).needs_calibration
        return record_inputs(loaded, spec, self.device, self.stats) if needs_calibration else loaded


class CacheRecordingLoader(Loader):
    """Loads layers whose attention adds its queries, keys and values to `stats`."""

    def __init__(self, source: TensorSource, recipe: Recipe, dtype: torch.dtype, device: torch.device, stats: CacheStats) -> None:
        super().__init__(source, recipe, dtype, device, SINGLE)
        self.stats = stats

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams
    ) -> Tensor:
        """Compute `ops.rope_attention` in two steps, and record the cache between them."""
        q = ops.rope_store(q, k, v, rotary, cache, batch.slots)
        self.stats.add(q, cache.keys, cache.values)
        return ops.attention(q, cache, batch, params)


def dense_tensors(spec: Spec, loader: Loader) -> dict[str, Tensor]:
    """The tensors of a spec before quantization, with their engine names."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: loader.tensor(spec)}
    tensors = {f"{spec.name}.weight": loader.source.get(f"{spec.name}.weight", spec.weight_shape, loader.dtype)}
    if spec.bias:
        tensors[f"{spec.name}.bias"] = loader.source.get(f"{spec.name}.bias", spec.bias_shape, loader.dtype)
    return tensors
