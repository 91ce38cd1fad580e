"""What each rank's file holds: stored tensors cut along their rows, columns and experts, whatever format they are in."""

from __future__ import annotations

import math
import re

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.builder.conversion.convert import Layouts, stored_tensors
from stoker.core.specs import LinearSpec, Spec
from stoker.distributed.pipeline import ALONE, PlannedStage, Stage
from stoker.engine.config import EngineConfig
from stoker.engine.tensor_file import ALIGNMENT, num_bytes
from stoker.layers.decoder import declare
from stoker.layers.shard import (
    Piece,
    Sharding,
    column_pieces,
    expert_pieces,
    has_bias,
    local_shape,
    local_spec,
    row_pieces,
    tensor_pieces,
)
from stoker.quant.format import Format, Layout
from stoker.quant.recipe import Recipe


class RankShare:
    """One rank's share of an engine's weights."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        mapping = config.mapping
        index, self.rank = divmod(rank, mapping.tensor_parallel)
        self.stage: Stage = PlannedStage(index, mapping.pipeline_parallel) if mapping.pipeline_parallel > 1 else ALONE
        self.sharding = config.sharding
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._specs = declare(config.model, config.recipe.kv_cache, self.stage)

    def layouts(self) -> Layouts:
        """(shape, dtype) of the file's tensors, in file order."""
        return {name: found for spec in file_order(self._config) for name, found in self.of(spec).items()}

    def of(self, spec: Spec) -> Layouts:
        """Those of one spec; none when another stage has it."""
        if spec.name not in self._specs:
            return {}
        if not isinstance(spec, LinearSpec):
            whole = stored_tensors(spec, self._config.recipe, self._dtype)[spec.name]
            return {spec.name: (local_shape(spec, self.sharding), whole.dtype)}
        local = stored_tensors(local_spec(spec, self.sharding), self._config.recipe, self._dtype)
        if not has_bias(spec, self.sharding, self.rank):
            local.pop(f"{spec.name}.bias", None)
        return {name: (layout.shape, layout.dtype) for name, layout in local.items()}

    def cut(self, spec: Spec, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of the stored tensor `name` of `spec`. Raises ConfigError when its format's units don't let it be cut there."""
        layout = stored_tensors(spec, self._config.recipe, self._dtype)[name]
        part = cut(spec, layout, tensor, self.sharding, self.rank)
        if tuple(part.shape) != self.of(spec)[name][0]:
            raise ConfigError(
                f"{name} of {list(tensor.shape)} cannot be cut for {self.sharding.size} ranks: its format orders all input features.",
                cure="Use one rank, or another quantization.",
            )
        return part


def file_order(config: EngineConfig) -> list[Spec]:
    """The specs as they follow in every rank's file: those that would misalign what comes after them go last."""
    dtype: torch.dtype = getattr(torch, config.dtype)

    def odd(spec: Spec) -> bool:
        local = local_spec(spec, config.sharding) if isinstance(spec, LinearSpec) else spec
        layouts = stored_tensors(local, config.recipe, dtype).values()
        shapes = [local_shape(spec, config.sharding)] if not isinstance(spec, LinearSpec) else [layout.shape for layout in layouts]
        return any(num_bytes(shape, layout.dtype) % ALIGNMENT for shape, layout in zip(shapes, layouts, strict=True))

    return sorted(declare(config.model, config.recipe.kv_cache).values(), key=odd)


def fit_recipe(config: EngineConfig) -> Recipe:
    """The recipe with groups that end where ranks are cut: heads of attention decide that, everything else is cut at whole groups."""
    recipe = config.recipe
    finer: dict[str, Format] = {}
    for spec in declare(config.model).values() if config.mapping.tensor_parallel > 1 else ():
        if isinstance(spec, LinearSpec) and spec.split in ("heads", "row_heads"):
            pattern = re.sub(r"^layers\.\d+\.", "layers.*.", spec.name)
            chosen = finer.get(pattern, recipe.format_for(spec))
            fitted = chosen.fitted(*_units(spec, config.sharding))
            if fitted != recipe.format_for(spec):
                finer[pattern] = fitted
    return msgspec.structs.replace(recipe, overrides=finer | recipe.overrides) if finer else recipe


def _units(spec: LinearSpec, sharding: Sharding) -> tuple[int, int]:
    """(rows, columns) at whose multiples every rank's share begins and ends."""
    units = []
    for of in (row_pieces, column_pieces):
        cuts = [piece for rank in range(sharding.size) for piece in of(spec, sharding, rank)]
        units.append(math.gcd(*(piece.length for piece in cuts), *(max(piece.start, 0) for piece in cuts)))
    return units[0], units[1]


def check_shares(config: EngineConfig) -> None:
    """Raise ConfigError when a weight cannot be cut for the ranks. Nothing is read: shapes are enough."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    for rank in range(config.mapping.world_size):
        share = RankShare(config, rank)
        for spec in declare(config.model, config.recipe.kv_cache).values():
            stored = stored_tensors(spec, config.recipe, dtype)
            for name in share.of(spec):
                share.cut(spec, name, torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta"))


def cut(spec: Spec, layout: Layout, tensor: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """The part of a stored tensor that a rank of `sharding` has. Raises ConfigError."""
    if not isinstance(spec, LinearSpec):
        return _take(spec.name, tensor, 0, tensor_pieces(spec, sharding, rank), 1)
    if spec.num_experts and (layout.row_axis or layout.col_axis):
        tensor = _take(spec.name, tensor, 0, expert_pieces(spec, sharding, rank), 1)
    if layout.row_axis is not None:
        tensor = _take(spec.name, tensor, layout.row_axis, row_pieces(spec, sharding, rank), layout.row_unit)
    if layout.col_axis is not None:
        tensor = _take(spec.name, tensor, layout.col_axis, column_pieces(spec, sharding, rank), layout.col_unit)
    return tensor


def _take(name: str, tensor: Tensor, axis: int, pieces: list[Piece], unit: int) -> Tensor:
    """Pieces of an axis, one after another; an index along it covers `unit` places."""
    if len(pieces) == 1 and pieces[0].start == 0 and -(-pieces[0].length // unit) == tensor.shape[axis]:
        return tensor
    parts, done = [], 0
    for start, length in pieces:
        first, last = -(-done // unit), -(-(done + length) // unit)
        done += length
        if start < 0:
            shape = [*tensor.shape[:axis], last - first, *tensor.shape[axis + 1 :]]
            parts.append(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
            continue
        ends_inside = (start + length) % unit and -(-(start + length) // unit) != tensor.shape[axis]
        if start % unit or (done - length) % unit or ends_inside:
            raise ConfigError(
                f"{name}: ranks would be cut inside {unit} neighbours that share a scale or a byte.",
                cure="Use a smaller group_size, or another number of ranks.",
            )
        parts.append(tensor.narrow(axis, start // unit, last - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
