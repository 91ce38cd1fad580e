"""Calibration of one layer: measure what its linears read, scale where that is free, round, and measure the KV cache.

The build runs it layer by layer, so one layer's weights are in memory at a time.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import ConfigError, EngineError
from stoker.core.model_config import AttentionConfig, LayerConfig, MLAConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.kernels import ops
from stoker.kernels.routing import Routing
from stoker.kernels.types import PLAIN, Fusion
from stoker.quant import fold as folding
from stoker.quant.format import TensorSource
from stoker.quant.keys import KeyStats, has_mean
from stoker.quant.linear_ops import ExpertsOp, LinearOp
from stoker.quant.recipe import Recipe
from stoker.quant.stats import InputStats

KV_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest value each KV dtype is scaled to
HELD_OUT_BYTES = 24_000  # the end of the default text, for the accuracy check


def default_text() -> str:
    """What calibration reads when no data is named: public-domain prose (calibration_text/README.txt)."""
    return _shipped()[:-HELD_OUT_BYTES]


def held_out_text() -> str:
    """Text that default calibration does not see."""
    return _shipped()[-HELD_OUT_BYTES:]


def _shipped() -> str:
    return resources.files("stoker.quant").joinpath("calibration_text", "text.txt").read_text(encoding="utf-8")


class Recorder(LinearOp, ExpertsOp):
    """A linear, or stacked experts, that counts what it reads."""

    def __init__(self, inner: Any, stats: InputStats) -> None:
        self.inner = inner
        self.stats = stats

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        def product(rows: Tensor) -> Tensor:
            self.stats.add(rows)
            return self.inner(rows)

        return ops.around(x, fusion, product)

    def up(self, x: Tensor, routing: Routing) -> Tensor:
        self.stats.add(x)
        return self.inner.up(x, routing)

    def down(self, x: Tensor, routing: Routing) -> Tensor:
        self.stats.add(x)
        return self.inner.down(x, routing)


def unit_of(largest: Tensor, kv_cache: str) -> Tensor:
    """The scale of a head whose largest magnitude this is. A power of two for e4m3: another would move its steps and gain nothing."""
    unit = (largest / KV_MAX[kv_cache]).clamp(min=1e-8)
    return unit if kv_cache == "int8" else unit.log2().ceil().exp2()


class CacheStats:
    """What a layer's quantized cache is made for, by the calibration tokens: `layers.decoder.kv_cache_specs`.

    `table`: the rotary rows of the windows' positions, which begin at 0, and of the rest of MEAN_TOKENS; None: nothing rotates.
    """

    def __init__(self, attention: AttentionConfig | MLAConfig, kv_cache: str, table: Tensor | None = None) -> None:
        self.kv_cache = kv_cache
        self.keys = KeyStats(attention, table, has_mean(attention, kv_cache)) if isinstance(attention, AttentionConfig) else None
        self.largest: dict[str, Tensor] = {}

    def add(self, queries: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """A window's queries [T, heads, size], and the block that holds its keys and values [1, kv_heads, T, size]; none is quantized."""
        if self.keys is None:
            self._add("key_scale", keys)
        else:
            self.keys.add(queries, keys[0].transpose(0, 1))
        if values is not None:
            self._add("value_scale", values)

    def _add(self, name: str, pages: Tensor) -> None:
        found = pages.float().abs().amax(dim=(0, 2, 3)).cpu()
        self.largest[name] = torch.maximum(self.largest[name], found) if name in self.largest else found

    def tensors(self) -> dict[str, Tensor]:
        """key_scale (and value_scale), float32 [kv_heads]; key_balance, float32 [kv_heads, 2, head_size], of keys that are no latents, and
        key_mean, float32 [kv_heads, head_size], of those that have one (`keys.has_mean`)."""
        scales = {name: unit_of(largest, self.kv_cache) for name, largest in self.largest.items()}
        if self.keys is None:
            return scales
        found = {"key_scale": unit_of(self.keys.largest(), self.kv_cache), "key_balance": self.keys.balance()}
        return scales | found | ({"key_mean": self.keys.mean()} if self.keys.less_mean else {})


class TensorTable(TensorSource):
    """Tensors of a dict, by engine name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self.tensors[name]
        if (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
            raise EngineError(f"{name} is {tensor.dtype} {list(tensor.shape)}, and {dtype} {list(shape)} is expected.", cure="Report this.")
        return tensor


def quantize_layer(
    config: LayerConfig, name: str, specs: dict[str, Spec], recipe: Recipe, weights: dict[str, Tensor], stats: dict[str, InputStats]
) -> dict[str, Tensor]:
    """The stored tensors of a layer from its dense `weights`, which are consumed, and the statistics of its calibrated linears' inputs."""
    linears = {spec.name: spec for spec in specs.values() if isinstance(spec, LinearSpec)}
    stats = dict(stats)
    for fold in folding.folds(config, name):
        _smooth(fold, linears, recipe, weights, stats)
    stored: dict[str, Tensor] = {}
    for spec in specs.values():
        if not isinstance(spec, LinearSpec):
            stored[spec.name] = weights.pop(spec.name)
            continue
        found = recipe.format_for(spec).quantize(weights.pop(f"{spec.name}.weight"), spec, stats.get(spec.name))
        stored |= {f"{spec.name}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}
        if spec.bias:
            stored[f"{spec.name}.bias"] = weights.pop(f"{spec.name}.bias")
    return stored


def _smooth(
    fold: folding.Fold, linears: dict[str, LinearSpec], recipe: Recipe, weights: dict[str, Tensor], stats: dict[str, InputStats]
) -> None:
    first = linears[fold.consumers[0]]
    if first.name not in stats:
        return
    rows = torch.cat([weights[f"{consumer}.weight"].flatten(0, -2) for consumer in fold.consumers])
    factors = recipe.format_for(first).smooth(rows, first, folding.tied(stats[first.name], fold))
    if factors is None:
        return
    factors = folding.apply(fold, factors, weights)
    for consumer in fold.consumers:
        if consumer in stats:
            stats[consumer] = stats[consumer].divided(factors)


def record(linear: LinearOp | Any, spec: LinearSpec, device: torch.device, stats: dict[str, InputStats]) -> Recorder:
    """`linear`, counting into stats[spec.name]."""
    stats[spec.name] = InputStats.zeros(spec.in_features, device)
    return Recorder(linear, stats[spec.name])


def check_counts(stats: dict[str, InputStats]) -> None:
    """Raise ConfigError for a linear that no calibration token reached."""
    for name, found in stats.items():
        if not found.count:
            raise ConfigError(f"{name}: no calibration token reached it.", cure="Raise --calibration-size.")
