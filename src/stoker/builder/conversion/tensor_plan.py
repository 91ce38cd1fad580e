"""From engine tensors to checkpoint tensors: the plan of a conversion, proven complete before a byte is read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import Stored, Weights
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.layers.decoder import declare
from stoker.models.architecture import Architecture, TensorNames, Transformed

_SUFFIXES = (".weight", ".bias")
SHOWN = 5  # names in a message
PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Making:
    """How one engine tensor is made: `sources` concatenated by rows, or combined; one list an expert when experts are stacked."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]  # one tuple, or one for each expert
    stacked: bool  # the tuples are stacked along a new first axis
    parts: tuple[int, ...] = ()  # rows of each source, where the engine says
    custom: Transformed | None = None


def plan(architecture: Architecture, config: ModelConfig, weights: Weights) -> dict[str, Making]:
    """A making for each tensor of the model, by engine name.

    Raises CheckpointError naming the tensors when one is missing, misshapen or left over.
    """
    names = architecture.tensor_names(config)
    makings = {r.name: r for spec in declare(config).values() for r in _makings(spec, names)}
    _check_present(makings, weights)
    for making in makings.values():
        _check_shape(making, weights, config)
    used = {source for r in makings.values() for group in r.sources for source in group}
    _check_unused(set(weights.stored) - used, architecture, config, names, weights)
    return makings


def weight_names(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The engine tensors of a spec before quantization, with their shapes."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: spec.shape}
    shapes = {f"{spec.name}.weight": spec.weight_shape}
    return shapes | {f"{spec.name}.bias": spec.bias_shape} if spec.bias else shapes


def _makings(spec: Spec, names: TensorNames) -> list[Making]:
    return [_making(name, shape, spec, names) for name, shape in weight_names(spec).items()]


def _making(name: str, shape: tuple[int, ...], spec: Spec, names: TensorNames) -> Making:
    found, layer, suffix = _find(name, names)
    custom = found if isinstance(found, Transformed) else None
    given = found.sources if isinstance(found, Transformed) else (found,) if isinstance(found, str) else found
    sources = [source if source.endswith(_SUFFIXES) else source + suffix for source in given]
    experts = spec.num_experts if isinstance(spec, LinearSpec) else 0
    stacked = any("{e}" in source for source in sources)
    groups = tuple(
        tuple(source.replace("{i}", layer).replace("{e}", str(e)) for source in sources) for e in range(experts if stacked else 1)
    )
    parts = spec.parts if isinstance(spec, LinearSpec) else ()
    return Making(name, shape, groups, stacked, parts, custom)


def _find(name: str, names: TensorNames) -> tuple[str | tuple[str, ...] | Transformed, str, str]:
    """The mapping of an engine tensor, its layer number, and the suffix that the mapping leaves out."""
    match = re.match(r"layers\.(\d+)\.", name)
    layer = match[1] if match else ""
    general = f"layers.{{i}}.{name[match.end() :]}" if match else name
    for full in (name, general):
        if full in names:
            return names[full], layer, ""
        module, _, suffix = full.rpartition(".")
        if module in names:
            return names[module], layer, f".{suffix}"
    raise CheckpointError(f"the architecture names no checkpoint tensor for {name}.", cure="Add it to the architecture's names.")


def _check_present(makings: Mapping[str, Making], weights: Weights) -> None:
    for making in makings.values():
        wanted = [source for group in making.sources for source in group]
        missing = [source for source in wanted if source not in weights.stored]
        if missing:
            others = f" ({len(wanted) - len(missing)} of its {len(wanted)} parts are there)" if len(wanted) > len(missing) else ""
            where = weights.files[0].parent if weights.files else "the checkpoint"
            raise CheckpointError(
                f"{where}: tensor {_some(missing)} is missing; {making.name} is made of it{others}.",
                cure="Check that config.json belongs to these weights, and download them again.",
            )


def _check_shape(making: Making, weights: Weights, config: ModelConfig) -> None:
    wanted = making.shape[1:] if making.stacked else making.shape
    for group in making.sources:
        found = [weights.stored[source] for source in group]
        parts = ", ".join(f"{weights.locate(source)} {list(s.shape)} {s.dtype}" for source, s in zip(group, found, strict=True))
        if making.custom is None and (odd := [s.dtype for s in found if s.dtype not in PLAIN]):
            raise CheckpointError(f"{parts}: weights of {odd[0]} are not plain numbers.", cure="Build from an unquantized checkpoint.")
        shape = _combined_shape(making, found, config)
        if shape != wanted or not _parts_fit(making, found):
            made = f"makes {making.name} of shape {list(shape)}" if shape else f"does not make {making.name}"
            says = f"config.json says {list(wanted)}" + (f" of rows {list(making.parts)}" if len(making.parts) > 1 else "")
            raise CheckpointError(f"{parts}: {made}, where {says}.", cure="Check that config.json belongs to these weights.")


def _parts_fit(making: Making, found: list[Stored]) -> bool:
    """Whether sources that are parts of a fused linear (q, k, v; gate, up) have each its own rows, not only the same sum."""
    if making.custom is not None or len(found) != len(making.parts) or len(found) == 1:
        return True
    return tuple(stored.shape[0] for stored in found) == making.parts


def _combined_shape(making: Making, found: list[Stored], config: ModelConfig) -> tuple[int, ...] | None:
    """The shape that the sources make; None when they don't fit together."""
    blanks = [torch.empty(stored.shape, dtype=stored.dtype, device="meta") for stored in found]
    try:
        return tuple(combine(making, blanks, config).shape)
    except (RuntimeError, ValueError, IndexError):
        return None


def combine(making: Making, tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """One engine tensor, or one expert's share of it."""
    if making.custom is not None:
        return making.custom.transform(tensors, config)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _check_unused(unused: set[str], architecture: Architecture, config: ModelConfig, names: TensorNames, weights: Weights) -> None:
    allowed = [*architecture.ignored_tensors]
    if config.tie_head:
        head = names.get("head", ())
        allowed += [f"{source}{suffix}" for source in ((head,) if isinstance(head, str) else ()) for suffix in _SUFFIXES]
    left = sorted(name for name in unused if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed))
    if left:
        raise CheckpointError(
            f"{weights.locate(left[0])}: {_some(left)} would be left out: {architecture.name} has no place for it.",
            cure="Check that config.json belongs to these weights.",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
