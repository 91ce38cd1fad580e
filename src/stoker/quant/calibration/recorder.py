"""A linear that records statistics of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.specs import LinearSpec
from stoker.distributed.group import SINGLE, Group
from stoker.kernels import ops
from stoker.kernels.routing import Routing
from stoker.kernels.types import PLAIN, Fusion, Gate
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.linear_ops import ExpertsOp, LinearOp


class Recorder(LinearOp, ExpertsOp):
    """A linear, or stacked experts, that adds the inputs of each call to `stats` and then computes the result as usual."""

    def __init__(self, inner: Any, stats: InputStats) -> None:
        self.inner = inner
        self.stats = stats

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        def product(rows: Tensor) -> Tensor:
            """Record the rows, and multiply them by the weight."""
            self.stats.add(rows)
            return self.inner(rows)

        return ops.around(x, fusion, product)

    def up(self, x: Tensor, routing: Routing, gate: Gate | None = None) -> Tensor:
        self.stats.add(x)
        return self.inner.up(x, routing, gate)

    def down(
        self, x: Tensor, routing: Routing, residual: Tensor | None = None, input_gate: str | None = None, group: Group = SINGLE
    ) -> Tensor:
        x = x if input_gate is None else ops.gated(x, input_gate)
        self.stats.add(x)
        return self.inner.down(x, routing, residual, group=group)


def record_inputs(linear: LinearOp | ExpertsOp, spec: LinearSpec, device: torch.device, stats: dict[str, InputStats]) -> Recorder:
    """Wrap `linear` so that its inputs are added to a new entry stats[spec.name]."""
    stats[spec.name] = InputStats.zeros(spec.in_features, device)
    return Recorder(linear, stats[spec.name])


def check_counts(stats: dict[str, InputStats]) -> None:
    """Raise ConfigError for a linear that no calibration token reached."""
    for name, found in stats.items():
        if not found.count:
            raise ConfigError(f"{name}: no calibration token reached it.", cure="Raise --calibration-size.")
