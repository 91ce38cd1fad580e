"""Plans which checkpoint tensors each engine tensor is made of, and checks names, shapes and dtypes before any tensor is read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.layers.decoder import declare
from stoker.models.architecture import Architecture, TensorNames, Transformed

_SUFFIXES = (".weight", ".bias")
_MAX_NAMES_SHOWN = 5
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CURE_MISMATCH = "Check that config.json belongs to these weights."


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one engine tensor is made: its sources are concatenated along the rows, or transformed by a function."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]  # names of checkpoint tensors: one tuple, or one per expert
    stacked: bool  # whether the tuples are experts, stacked along a new first axis
    parts: tuple[int, ...] = ()  # rows of each part of a fused linear
    transformed: Transformed | None = None
    partners: tuple[str, ...] = ()  # engine tensors that are made of the same sources


def plan_tensors(architecture: Architecture, config: ModelConfig, weights: CheckpointWeights) -> dict[str, TensorPlan]:
    """The plan of each engine tensor of the model, by name.

    Raises CheckpointError naming the tensors when one is missing, has the wrong shape, or is not used.
    """
    names = architecture.tensor_names(config)
    plans = tensors_of_names(names, config)
    _check_present(plans, weights)
    for plan in plans.values():
        _check_shape(plan, weights, config)
    used = {source for plan in plans.values() for group in plan.sources for source in group}
    _check_unused(set(weights.tensors) - used, architecture, config, names, weights)
    return plans


def tensors_of_names(names: TensorNames, config: ModelConfig) -> dict[str, TensorPlan]:
    """The plan of each engine tensor of the model, by name, without looking at a checkpoint."""
    return {plan.name: plan for spec in declare(config).values() for plan in plans_of(spec, names)}


def dense_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The engine tensors of a spec before quantization, with their shapes."""
    if not isinstance(spec, LinearSpec):
        return {spec.name: spec.shape}
    shapes = {f"{spec.name}.weight": spec.weight_shape}
    return shapes | {f"{spec.name}.bias": spec.bias_shape} if spec.bias else shapes


def is_computed(name: str, names: TensorNames) -> bool:
    """Whether a function computes the values of the engine tensor `name`, which are otherwise concatenated or moved."""
    found = _look_up(name, names)[0]
    return isinstance(found, Transformed) and found.moves is None


def combine_sources(plan: TensorPlan, tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The engine tensor, or one expert of it, computed from the tensors of one tuple of `plan.sources`."""
    if plan.transformed is not None:
        return plan.transformed.transform(tensors, config)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def plans_of(spec: Spec, names: TensorNames) -> list[TensorPlan]:
    """The plans of all engine tensors of a spec."""
    return [_plan(name, shape, spec, names) for name, shape in dense_shapes(spec).items()]


def _plan(name: str, shape: tuple[int, ...], spec: Spec, names: TensorNames) -> TensorPlan:
    """The plan of one engine tensor."""
    found, layer, suffix = _look_up(name, names)
    transformed = found if isinstance(found, Transformed) else None
    given = found.sources if isinstance(found, Transformed) else (found,) if isinstance(found, str) else found
    sources = [source if source.endswith(_SUFFIXES) else source + suffix for source in given]
    experts = spec.num_experts if isinstance(spec, LinearSpec) else 0
    stacked = any("{e}" in source for source in sources)
    groups = tuple(
        tuple(source.replace("{i}", layer).replace("{e}", str(e)) for source in sources) for e in range(experts if stacked else 1)
    )
    parts = spec.parts if isinstance(spec, LinearSpec) else ()
    partners = () if transformed is None else tuple(partner.replace("{i}", layer) + suffix for partner in transformed.partners)
    return TensorPlan(name, shape, groups, stacked, parts, transformed, partners)


def _look_up(name: str, names: TensorNames) -> tuple[str | tuple[str, ...] | Transformed, str, str]:
    """(entry of `names` for an engine tensor, its layer index or "", the suffix that the entry leaves out)."""
    match = re.match(r"layers\.(\d+)\.", name)
    layer = match[1] if match else ""
    for_any_layer = f"layers.{{i}}.{name[match.end() :]}" if match else name
    for key in (name, for_any_layer):
        if key in names:
            return names[key], layer, ""
        module, _, suffix = key.rpartition(".")
        if module in names:
            return names[module], layer, f".{suffix}"
    raise CheckpointError(f"the architecture names no checkpoint tensor for {name}.", cure="Add it to the architecture's tensor_names.")


def _check_present(plans: Mapping[str, TensorPlan], weights: CheckpointWeights) -> None:
    """Raise CheckpointError for a source that the checkpoint does not contain."""
    for plan in plans.values():
        sources = [source for group in plan.sources for source in group]
        missing = [source for source in sources if source not in weights.tensors]
        if missing:
            found = f" ({len(sources) - len(missing)} of its {len(sources)} parts were found)" if len(sources) > len(missing) else ""
            where = weights.files[0].parent if weights.files else "the checkpoint"
            raise CheckpointError(
                f"{where}: tensor {_list_names(missing)} is missing; {plan.name} is made of it{found}.",
                cure="Check that config.json belongs to these weights, and download them again.",
            )


def _check_shape(plan: TensorPlan, weights: CheckpointWeights, config: ModelConfig) -> None:
    """Raise CheckpointError for sources of another dtype or shape than the engine tensor requires."""
    expected = plan.shape[1:] if plan.stacked else plan.shape
    for group in plan.sources:
        infos = [weights.tensors[source] for source in group]
        listed = ", ".join(f"{weights.location(source)} {list(info.shape)} {info.dtype}" for source, info in zip(group, infos, strict=True))
        if wrong := [info.dtype for info in infos if info.dtype not in _FLOAT_DTYPES]:
            raise CheckpointError(
                f"{listed}: weights of {wrong[0]} are not floating-point numbers.", cure="Build from an unquantized checkpoint."
            )
        shape = _combined_shape(plan, infos, config)
        if shape != expected or not _parts_match(plan, infos):
            made = f"makes {plan.name} of shape {list(shape)}" if shape else f"does not make {plan.name}"
            parts = f" with parts of {list(plan.parts)} rows" if len(plan.parts) > 1 else ""
            raise CheckpointError(f"{listed}: {made}, and config.json implies {list(expected)}{parts}.", cure=_CURE_MISMATCH)


def _parts_match(plan: TensorPlan, infos: list[TensorInfo]) -> bool:
    """Whether each part of a fused linear (q, k, v; gate, up) has the right number of rows. An equal sum is not sufficient."""
    if plan.transformed is not None or len(infos) != len(plan.parts) or len(infos) == 1:
        return True
    return tuple(info.shape[0] for info in infos) == plan.parts


def _combined_shape(plan: TensorPlan, infos: list[TensorInfo], config: ModelConfig) -> tuple[int, ...] | None:
    """The shape of the tensor that the sources make together, or None if they do not fit together."""
    meta_tensors = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos]
    try:
        return tuple(combine_sources(plan, meta_tensors, config).shape)
    except (RuntimeError, ValueError, IndexError):
        return None


def _check_unused(
    unused: set[str], architecture: Architecture, config: ModelConfig, names: TensorNames, weights: CheckpointWeights
) -> None:
    """Raise CheckpointError for an unused tensor that is neither ignored by the architecture nor the copy of a tied head."""
    allowed = [*architecture.ignored_tensors]
    if config.tie_head:
        head = names.get("head", ())
        allowed += [f"{source}.weight" for source in ((head,) if isinstance(head, str) else ())]
    remaining = sorted(name for name in unused if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed))
    if remaining:
        raise CheckpointError(
            f"{weights.location(remaining[0])}: {_list_names(remaining)} would not be used: {architecture.name} has no such tensor.",
            cure=_CURE_MISMATCH,
        )


def _list_names(names: list[str]) -> str:
    """The first names, and the number of others."""
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more
