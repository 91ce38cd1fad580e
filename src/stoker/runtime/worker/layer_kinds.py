"""Which layers of a stage launch the same kernels, so that a few of them stand for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.core.specs import LinearSpec
from stoker.engine.reader import Engine
from stoker.layers.decoder import layer_specs
from stoker.layers.fused_layer import FusedLayers


def distinct_layers(engine: Engine, layers: Sequence[int], fused_layers: FusedLayers | None) -> list[int]:
    """Indices of the layers of a stage that launch other kernels than all layers before them.

    A fused layer computes the queries, keys and values of the next layer, so no layer can be left out where their widths differ.
    """
    kinds: list[Any] = [_kind(engine, layer) for layer in layers]
    if fused_layers is not None:
        if len({(one.num_heads + 2 * one.num_kv_heads) * one.head_size for one in fused_layers.attentions}) > 1:
            return list(range(len(kinds)))
        kinds = list(zip(kinds, [*kinds[1:], None], strict=True))
    return [i for i, kind in enumerate(kinds) if kinds.index(kind) == i]


def representative_layers(engine: Engine, layers: Sequence[int]) -> list[int] | None:
    """Indices of a few layers of a stage that, run alone, launch the kernels of all layers and need as much memory; None without such.

    Each layer stands for those of its kind between the same kinds, and must be between them among the few layers, too.
    """
    kinds: list[Any] = [_kind(engine, layer) for layer in layers]
    numbers = [kinds.index(kind) for kind in kinds]
    between = list(zip([-1, *numbers], numbers, [*numbers[1:], -1], strict=False))
    indices = [i for i, place in enumerate(between) if between.index(place) == i]
    chosen = [numbers[i] for i in indices]
    if len(indices) == len(kinds) or [between[i] for i in indices] != list(zip([-1, *chosen], chosen, [*chosen[1:], -1], strict=False)):
        return None
    return indices


def _kind(engine: Engine, layer: int) -> tuple[Any, ...]:
    """The properties that determine which kernels a layer launches."""
    model, recipe = engine.config.model, engine.config.recipe
    formats = [recipe.format_for(spec) for spec in layer_specs(model, layer).values() if isinstance(spec, LinearSpec)]
    return model.layers[layer], formats
