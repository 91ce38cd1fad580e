"""Checkpoint tensors become engine tensors, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.names import Making, combine
from stoker.builder.weights import Weights
from stoker.engine.tensor_file import ALIGNMENT, num_bytes
from stoker.layers.config import ModelConfig
from stoker.layers.decoder import declare
from stoker.layers.specs import LinearSpec, Spec
from stoker.quant.recipe import Recipe

# (shape, dtype) of stored tensors by engine name, in file order.
Layouts = dict[str, tuple[tuple[int, ...], torch.dtype]]


def layouts(spec: Spec, recipe: Recipe, dtype: torch.dtype) -> Layouts:
    """The stored tensors of one spec, whole."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: (spec.shape, getattr(torch, spec.dtype) if spec.dtype else dtype)}
    parts = recipe.format_for(spec).layout(spec, dtype)
    stored: Layouts = {f"{spec.name}.{suffix}": (layout.shape, layout.dtype) for suffix, layout in parts.items()}
    return stored | {f"{spec.name}.bias": (spec.bias_shape, dtype)} if spec.bias else stored


def stored_layouts(config: ModelConfig, recipe: Recipe, dtype: torch.dtype) -> Layouts:
    """Every stored tensor of a model, in file order."""
    return {name: layout for spec in file_order(config, recipe, dtype) for name, layout in layouts(spec, recipe, dtype).items()}


def file_order(config: ModelConfig, recipe: Recipe, dtype: torch.dtype) -> list[Spec]:
    """The specs as they follow in a file: those that would misalign what comes after them go last."""

    def odd(spec: Spec) -> bool:
        return any(num_bytes(*layout) % ALIGNMENT for layout in layouts(spec, recipe, dtype).values())

    return sorted(declare(config, recipe.kv_cache).values(), key=odd)


def convert(
    specs: list[Spec], makings: Mapping[str, Making], weights: Weights, config: ModelConfig, recipe: Recipe, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of `specs` in order, as `layouts` says. Holds one spec's tensors at a time."""
    for spec in specs:
        if isinstance(spec, LinearSpec):
            yield from _linear(spec, makings, weights, config, recipe, dtype)
        else:
            wanted = getattr(torch, spec.dtype) if spec.dtype else dtype
            yield spec.name, make(makings[spec.name], weights, config, wanted)


def _linear(
    spec: LinearSpec, makings: Mapping[str, Making], weights: Weights, config: ModelConfig, recipe: Recipe, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    chosen = recipe.format_for(spec)
    stored = chosen.quantize(make(makings[f"{spec.name}.weight"], weights, config, dtype), spec)
    for suffix in chosen.layout(spec, dtype):
        yield f"{spec.name}.{suffix}", stored.pop(suffix)
    if spec.bias:
        yield f"{spec.name}.bias", make(makings[f"{spec.name}.bias"], weights, config, dtype)


def make(making: Making, weights: Weights, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """One engine tensor in `dtype`. Raises CheckpointError when a value is not finite, before or after the cast."""
    out = torch.empty(making.shape, dtype=dtype)
    shares = out.unbind(0) if making.stacked else (out,)
    for share, group in zip(shares, making.sources, strict=True):
        if making.custom is not None:
            made = combine(making, [weights.read(source) for source in group], config)
            share.copy_(made)
            _check_finite(share, group[0], weights)
        else:
            _fill(share.view(-1), group, weights)
    return out


def _fill(flat: Tensor, sources: tuple[str, ...], weights: Weights) -> None:
    """Sources one after another: rows concatenated are elements concatenated."""
    done = 0
    for source in sources:
        for piece in weights.chunks(source):
            part = flat[done : done + piece.numel()]
            part.copy_(piece)
            _check_finite(part, source, weights)
            done += piece.numel()


def _check_finite(values: Tensor, source: str, weights: Weights) -> None:
    if not bool(torch.isfinite(values).all()):
        what = "holds NaN or infinity, or overflows" if values.dtype == torch.float16 else "holds NaN or infinity in"
        raise CheckpointError(f"{weights.locate(source)} {what} {values.dtype}.", cure="Download it again, or build with --dtype bfloat16.")
