"""Divides the stored tensors of an engine among its ranks, along rows, columns and experts, in any format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.builder.conversion.layouts import stored_layouts
from stoker.core.specs import LinearSpec, Spec
from stoker.distributed.pipeline import ALONE, PlannedStage, Stage
from stoker.engine.config import EngineConfig
from stoker.engine.safetensors_header import ALIGNMENT, TensorLayouts, num_bytes
from stoker.layers.decoder import declare
from stoker.layers.shard import (
    AxisSlice,
    Sharding,
    column_slices,
    expert_slices,
    has_bias,
    local_shape,
    local_spec,
    row_slices,
    tensor_slices,
)
from stoker.quant.format import Format, Layout
from stoker.quant.recipe import Recipe


class ShardPlan:
    """The shards of one rank: the layout of its file, and the part of each stored tensor that the file contains."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        mapping = config.mapping
        stage_index, self.rank = divmod(rank, mapping.stage_size)
        self.stage: Stage = PlannedStage(stage_index, mapping.pipeline_parallel) if mapping.pipeline_parallel > 1 else ALONE
        self.sharding = config.sharding
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._specs = declare(config.model, config.recipe.kv_cache, self.stage)

    def layouts(self) -> TensorLayouts:
        """(shape, dtype) of each tensor in the rank's file, by name, in file order."""
        return {name: layout for spec in specs_in_file_order(self._config) for name, layout in self.layouts_of(spec).items()}

    def layouts_of(self, spec: Spec) -> TensorLayouts:
        """(shape, dtype) of the rank's tensors for one spec, by name; empty when another pipeline stage holds it."""
        if spec.name not in self._specs:
            return {}
        if not isinstance(spec, LinearSpec):
            whole = stored_layouts(spec, self._config.recipe, self._dtype)[spec.name]
            return {spec.name: (local_shape(spec, self.sharding), whole.dtype)}
        local = stored_layouts(local_spec(spec, self.sharding), self._config.recipe, self._dtype)
        if not has_bias(spec, self.sharding, self.rank):
            local.pop(f"{spec.name}.bias", None)
        return {name: (layout.shape, layout.dtype) for name, layout in local.items()}

    def shard_of(self, spec: Spec, name: str, tensor: Tensor) -> Tensor:
        """The rank's shard of the stored tensor `name` of `spec`. Raises ConfigError when the format cannot be divided there."""
        layout = stored_layouts(spec, self._config.recipe, self._dtype)[name]
        shard = slice_shard(spec, layout, tensor, self.sharding, self.rank)
        if tuple(shard.shape) != self.layouts_of(spec)[name][0]:
            raise ConfigError(
                f"{name} of {list(tensor.shape)} cannot be split over {self.sharding.size} ranks: its format reorders the input features.",
                cure="Use one rank, or another quantization.",
            )
        return shard


def specs_in_file_order(config: EngineConfig) -> list[Spec]:
    """All specs in the order of every rank's file. Specs whose size would misalign the following tensors come last."""
    dtype: torch.dtype = getattr(torch, config.dtype)

    def is_unaligned(spec: Spec) -> bool:
        """Whether a stored tensor of the spec has a size that is no multiple of the alignment."""
        local = local_spec(spec, config.sharding) if isinstance(spec, LinearSpec) else spec
        layouts = stored_layouts(local, config.recipe, dtype).values()
        shapes = [local_shape(spec, config.sharding)] if not isinstance(spec, LinearSpec) else [layout.shape for layout in layouts]
        return any(num_bytes(shape, layout.dtype) % ALIGNMENT for shape, layout in zip(shapes, layouts, strict=True))

    return sorted(declare(config.model, config.recipe.kv_cache).values(), key=is_unaligned)


def fit_recipe_to_shards(config: EngineConfig) -> Recipe:
    """The recipe with groups and blocks that no shard boundary divides.

    Only the linears of attention need smaller groups, because they are split by heads; all others are split at whole groups.
    """
    recipe = config.recipe
    fitted_formats: dict[str, Format] = {}
    for spec in declare(config.model).values() if config.mapping.tensor_parallel > 1 else ():
        if isinstance(spec, LinearSpec) and spec.split in ("heads", "row_heads"):
            pattern = re.sub(r"^layers\.\d+\.", "layers.*.", spec.name)
            chosen = fitted_formats.get(pattern, recipe.format_for(spec))
            fitted = chosen.aligned_to(*_boundary_units(spec, config.sharding))
            if fitted != recipe.format_for(spec):
                fitted_formats[pattern] = fitted
    return msgspec.structs.replace(recipe, overrides=fitted_formats | recipe.overrides) if fitted_formats else recipe


def _boundary_units(spec: LinearSpec, sharding: Sharding) -> tuple[int, int]:
    """(rows, columns): numbers of which the boundaries of all shards of `spec` are multiples."""
    units = []
    for slices_of in (row_slices, column_slices):
        slices = [part for rank in range(sharding.size) for part in slices_of(spec, sharding, rank)]
        units.append(math.gcd(*(part.length for part in slices), *(max(part.start, 0) for part in slices)))
    return units[0], units[1]


def check_shards(config: EngineConfig) -> None:
    """Raise ConfigError when a weight cannot be divided among the ranks. Uses meta tensors; no weight is read."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    for rank in range(config.mapping.world_size):
        plan = ShardPlan(config, rank)
        for spec in declare(config.model, config.recipe.kv_cache).values():
            stored = stored_layouts(spec, config.recipe, dtype)
            for name in plan.layouts_of(spec):
                plan.shard_of(spec, name, torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta"))


def slice_shard(spec: Spec, layout: Layout, tensor: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """The part of a stored tensor that a rank of a stage holds. Raises ConfigError when a boundary divides a group."""
    for axis, slices, unit in _sliced_axes(spec, layout, sharding, rank):
        tensor = _concatenate_slices(spec.name, tensor, axis, slices, unit)
    return tensor


def merge_shards(spec: Spec, layout: Layout, shards: list[Tensor], sharding: Sharding) -> Tensor:
    """The stored tensor of which `shards` are the parts of all ranks of a stage: the inverse of `slice_shard`."""
    if len(shards) == 1:
        return shards[0]
    whole = torch.empty(layout.shape, dtype=layout.dtype)
    for rank, shard in enumerate(shards):
        regions = [(whole, shard)]
        for axis, slices, unit in _sliced_axes(spec, layout, sharding, rank):
            pairs = list(_slice_pairs(slices, unit))
            regions = [
                (to.narrow(axis, start, length), part.narrow(axis, first, length)) for to, part in regions for start, first, length in pairs
            ]
        for to, part in regions:
            to.copy_(part)
    return whole


def _sliced_axes(spec: Spec, layout: Layout, sharding: Sharding, rank: int) -> Iterator[tuple[int, list[AxisSlice], int]]:
    """(axis, the slices of a rank, rows or columns per index) of each axis along which a stored tensor is divided."""
    if not isinstance(spec, LinearSpec):
        yield 0, tensor_slices(spec, sharding, rank), 1
        return
    if spec.num_experts and (layout.row_axis or layout.col_axis):
        yield 0, expert_slices(spec, sharding, rank), 1
    if layout.row_axis is not None:
        yield layout.row_axis, row_slices(spec, sharding, rank), layout.row_unit
    if layout.col_axis is not None:
        yield layout.col_axis, column_slices(spec, sharding, rank), layout.col_unit


def _slice_pairs(slices: list[AxisSlice], unit: int) -> Iterator[tuple[int, int, int]]:
    """(start in the whole tensor, start in the shard, length) of each slice, in indices of `unit` rows or columns. Zeros are left out."""
    done = 0
    for start, length in slices:
        first, last = -(-done // unit), -(-(done + length) // unit)
        done += length
        if start >= 0:
            yield start // unit, first, last - first


def _concatenate_slices(name: str, tensor: Tensor, axis: int, slices: list[AxisSlice], unit: int) -> Tensor:
    """The slices of one axis, concatenated. One index along the axis covers `unit` rows or columns; a negative start means zeros."""
    if len(slices) == 1 and slices[0].start == 0 and -(-slices[0].length // unit) == tensor.shape[axis]:
        return tensor
    parts, done = [], 0
    for start, length in slices:
        first, last = -(-done // unit), -(-(done + length) // unit)
        done += length
        if start < 0:
            shape = [*tensor.shape[:axis], last - first, *tensor.shape[axis + 1 :]]
            parts.append(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
            continue
        ends_inside_unit = (start + length) % unit and -(-(start + length) // unit) != tensor.shape[axis]
        if start % unit or (done - length) % unit or ends_inside_unit:
            raise ConfigError(
                f"{name}: a rank boundary would divide {unit} values that share a scale or a byte.",
                cure="Use a smaller group_size, or another number of ranks.",
            )
        parts.append(tensor.narrow(axis, start // unit, last - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
