"""Checkpoint tensors become engine tensors, one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.base.logging import get_logger
from stoker.builder.checkpoint.weights import Weights
from stoker.builder.conversion.tensor_plan import Making, combine
from stoker.builder.prequantized.import_weights import keepable, take
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.quant.format import Format, Layout
from stoker.quant.recipe import AS_STORED, Recipe

# Of a weight, quantized at a time: what that takes on the way stays small, and on a CPU in its caches.
PIECE_VALUES = {"cpu": 1 << 21, "cuda": 1 << 26}

CPU = torch.device("cpu")

log = get_logger(__name__)

# (shape, dtype) of stored tensors by engine name, in file order.
Layouts = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Ready(Protocol):
    """Stored tensors that exist already, by engine name; `in` asks for a spec's name."""

    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> Tensor: ...


def stored_tensors(spec: Spec, recipe: Recipe, dtype: torch.dtype) -> dict[str, Layout]:
    """The stored tensors of one spec, whole, by engine name."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: Layout(spec.shape, getattr(torch, spec.dtype) if spec.dtype else dtype, row_axis=0)}
    stored = {f"{spec.name}.{suffix}": part for suffix, part in recipe.format_for(spec).layout(spec, dtype).items()}
    return stored | {f"{spec.name}.bias": Layout(spec.bias_shape, dtype, row_axis=len(spec.bias_shape) - 1)} if spec.bias else stored


def convert(
    spec: Spec,
    makings: Mapping[str, Making],
    weights: Weights,
    config: ModelConfig,
    recipe: Recipe,
    dtype: torch.dtype,
    calibrated: Ready | None = None,
    device: torch.device = CPU,
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one spec, whole, in the order of `stored_tensors`; `calibrated` may have them ready.

    They are made on `device`, and stay there; those that it has no room for are the CPU's.
    """
    if calibrated is not None and spec.name in calibrated:
        yield from ((name, calibrated[name]) for name in stored_tensors(spec, recipe, dtype))
    elif isinstance(spec, LinearSpec):
        yield from _linear(spec, makings, weights, config, recipe, dtype, device)
    else:
        wanted = getattr(torch, spec.dtype) if spec.dtype else dtype
        yield spec.name, make(makings[spec.name], weights, config, wanted, device)


def _linear(
    spec: LinearSpec,
    makings: Mapping[str, Making],
    weights: Weights,
    config: ModelConfig,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    chosen = recipe.format_for(spec)
    if recipe.name == AS_STORED and keepable(spec, makings, weights) is not None:
        stored = take(spec, chosen, makings, weights)
        for suffix, tensor in stored.items():
            _check_taken(f"{spec.name}.{suffix}", tensor, weights.locate(makings[f"{spec.name}.weight"].sources[0][0]))
    else:
        making = makings[f"{spec.name}.weight"]
        try:
            stored = quantized(chosen, make(making, weights, config, dtype, device), spec)
        except torch.OutOfMemoryError:
            if device == CPU:
                raise
            log.info("%s is made on the CPU: %s has no room for it", spec.name, device)
            stored = quantized(chosen, make(making, weights, config, dtype, CPU), spec)
    for suffix in chosen.layout(spec, dtype):
        yield f"{spec.name}.{suffix}", stored.pop(suffix)
    if spec.bias:
        yield f"{spec.name}.bias", make(makings[f"{spec.name}.bias"], weights, config, dtype, device)


def quantized(chosen: Format, weight: Tensor, spec: LinearSpec) -> dict[str, Tensor]:
    """`chosen.quantize` of weight [(experts,) out, in], some rows at a time where rows do not depend on each other."""
    rows, together, piece = weight.shape[-2], chosen.rows_together, PIECE_VALUES[weight.device.type]
    if together is None or weight.numel() <= piece:
        return chosen.quantize(weight, spec)
    step = max(together, piece // weight.shape[-1] // together * together)
    layout = chosen.layout(spec, weight.dtype)
    stored = {suffix: torch.empty(part.shape, dtype=part.dtype, device=weight.device) for suffix, part in layout.items()}
    places = [stored] if weight.dim() == 2 else [{suffix: t[e] for suffix, t in stored.items()} for e in range(len(weight))]
    for matrix, into in zip(weight.view(-1, *weight.shape[-2:]), places, strict=True):
        for first in range(0, rows, step):
            for suffix, part in chosen.quantize(matrix[first : first + step], spec).items():
                into[suffix].narrow(0, first // layout[suffix].row_unit, len(part)).copy_(part)
    return stored


def make(making: Making, weights: Weights, config: ModelConfig, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """One engine tensor in `dtype` on `device`. Raises CheckpointError when a value is not finite, before or after the cast."""
    out = torch.empty(making.shape, dtype=dtype, device=device)
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
        for part in weights.fill(source, flat[done : done + math.prod(weights.stored[source].shape)]):
            _check_finite(part, source, weights)
            done += part.numel()


def _check_taken(name: str, tensor: Tensor, where: str) -> None:
    """Raise CheckpointError when a tensor that is stored as the checkpoint has it holds what is no number."""
    if not tensor.dtype.is_floating_point:
        return
    wrong = torch.isnan(tensor) if tensor.dtype.itemsize == 1 else ~torch.isfinite(tensor)  # e4m3fn has no infinity
    if bool(wrong.any()):
        raise CheckpointError(f"{where}: {name}, which is made of it, would hold NaN or infinity.", cure="Download it again.")


def _check_finite(values: Tensor, source: str, weights: Weights) -> None:
    if not values.numel():
        return
    least, most = values.aminmax()  # a NaN is both; isfinite of every value takes thrice as long
    if not bool(torch.isfinite(least) & torch.isfinite(most)):
        what = "holds NaN or infinity, or overflows" if values.dtype == torch.float16 else "holds NaN or infinity in"
        raise CheckpointError(f"{weights.locate(source)} {what} {values.dtype}.", cure="Download it again, or build with --dtype bfloat16.")
