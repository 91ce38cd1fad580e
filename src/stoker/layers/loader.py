"""Loads the weights that blocks declare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.distributed.group import Group
from stoker.distributed.token_dispatch import TokenDispatch
from stoker.kernels import ops
from stoker.layers.low_rank import Adapters
from stoker.layers.shard import WHOLE, Sharding, has_bias, local_shape, local_spec
from stoker.quant.format import TensorSource
from stoker.quant.linear_ops import ExpertsOp, LinearOp
from stoker.quant.recipe import Recipe


class Loader:
    """Loads this rank's shard of each declared weight from `source`, with the formats of the recipe."""

    attention = staticmethod(ops.rope_attention)  # the attention of blocks; calibration replaces it

    def __init__(
        self,
        source: TensorSource,
        recipe: Recipe,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        sharding: Sharding = WHOLE,
        adapters: Adapters | None = None,
        dispatch: TokenDispatch | None = None,
    ) -> None:
        """`group`: the tensor-parallel ranks. `dispatch`: that of tokens among data-parallel ranks, if there are several."""
        self.source = source
        self.recipe = recipe
        self.dtype = dtype
        self.device = device
        self.group = group
        self.sharding = sharding
        self.adapters = adapters
        self.dispatch = dispatch

    def load(self, specs: dict[str, Spec]) -> dict[str, Any]:
        """Load the linears and tensors of `specs`. The result has the same keys."""
        return {key: self.linear(spec) if isinstance(spec, LinearSpec) else self.tensor(spec) for key, spec in specs.items()}

    def linear(self, spec: LinearSpec) -> LinearOp | ExpertsOp:
        """Load the linear, or the stacked experts, that a spec declares, with its adapters.

        Raises EngineError for a wrong shape or dtype.
        """
        local = local_spec(spec, self.sharding)
        chosen = self.recipe.format_for(spec)
        stored = {
            suffix: self.source.get(f"{spec.name}.{suffix}", layout.shape, layout.dtype)
            for suffix, layout in chosen.layout(local, self.dtype).items()
        }
        bias = (
            self.source.get(f"{spec.name}.bias", local.bias_shape, self.dtype) if has_bias(spec, self.sharding, self.group.rank) else None
        )
        loaded = chosen.load(stored, bias)
        return loaded if self.adapters is None else self.adapters.adapt(loaded, spec, self.sharding, self.group.rank)

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Load this rank's shard of the tensor that a spec declares. Raises EngineError for a wrong shape or dtype."""
        dtype = getattr(torch, spec.dtype) if spec.dtype else self.dtype
        return self.source.get(spec.name, local_shape(spec, self.sharding), dtype)
