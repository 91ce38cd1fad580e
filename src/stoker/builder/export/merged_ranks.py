"""The whole stored tensors of an engine, merged from the files of its ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import EngineError
from stoker.builder.conversion.layouts import stored_layouts
from stoker.builder.conversion.shard_plan import ShardPlan, merge_shards
from stoker.core.specs import Spec
from stoker.engine.reader import Engine
from stoker.engine.tensor_source import REBUILD, FileTensorSource


class MergedRanks:
    """The stored tensors of all ranks and pipeline stages. A tensor of one rank is a view of the mapped file."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        ranks = range(engine.world_size)
        self._plans = [ShardPlan(engine.config, rank) for rank in ranks]
        self._sources = [FileTensorSource(engine.path / f"rank{rank}.safetensors", torch.device("cpu")) for rank in ranks]

    def tensors_of(self, spec: Spec) -> dict[str, Tensor]:
        """The whole stored tensors of a spec, by engine name.

        A tensor of which only rank 0 has a copy, such as the bias of a linear whose results are summed, is that copy.
        """
        config = self._engine.config
        found: dict[str, Tensor] = {}
        for name, layout in stored_layouts(spec, config.recipe, self._engine.dtype).items():
            shards: list[Tensor] = []
            for plan, source in zip(self._plans, self._sources, strict=True):
                local = plan.layouts_of(spec)
                if name in local and len(shards) < config.mapping.stage_size:
                    shards.append(source.get(name, *local[name]))
            if not shards:
                raise EngineError(f"{self._engine.path}: no rank has {name}.", cure=REBUILD)
            found[name] = merge_shards(spec, layout, shards, config.sharding)
        return found
