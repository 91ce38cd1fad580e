"""Low-rank adapters (LoRA, arXiv 2106.09685): a linear adds the delta of each row's adapter to its product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.shard import AxisSlice, Sharding, column_slices, row_slices
from stoker.quant.linear_ops import ExpertsOp, LinearOp


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """The deltas of all adapters to one linear: with adapter i the weight is W + scaling[i] × B[i] A[i].

    Adapters of a lower rank are padded with zeros. A multiplies the input of the engine's linear. Formats with scale folding divide that
    input by factors which the engine does not store, so adapters of the original model fit engines of the other formats only.
    """

    a: Tensor  # [adapters, rank, in_features], in the model's dtype
    b: Tensor  # [adapters, out_features, rank], in the model's dtype
    scaling: Tensor  # float32 [adapters]

    def __call__(self, x: Tensor, adapter_ids: Tensor) -> Tensor:
        """scaling × B A x for each row of x [T, in_features] and its adapter: [T, out_features]. Rows with adapter -1 are zeros.

        `adapter_ids` is int32 [T]. The A of all adapters are multiplied by all rows, so that the shapes do not depend on the ids and a step
        can be captured.
        """
        num_adapters, rank, _ = self.a.shape
        inner = F.linear(x, self.a.flatten(0, 1)).unflatten(-1, (num_adapters, rank)) * self.scaling[:, None]
        is_own = adapter_ids[:, None] == torch.arange(num_adapters, device=x.device)
        inner = inner.masked_fill(~is_own[:, :, None], 0.0).to(x.dtype)
        return torch.einsum("tar,aor->to", inner, self.b)


class Adapters:
    """The low-rank deltas of a model, by the name of the linear that they change, and the adapters of the current step.

    `Decoder` sets `ids` before the first layer: `ForwardBatch.adapter_ids`, or None when no token has an adapter.
    """

    def __init__(self, deltas: dict[str, LowRankDelta]) -> None:
        self.deltas = deltas
        self.ids: Tensor | None = None

    def adapt(self, linear: LinearOp | ExpertsOp, spec: LinearSpec, sharding: Sharding, rank: int) -> LinearOp | ExpertsOp:
        """`linear` combined with this rank's shard of its delta, or `linear` itself if it has none.

        Raises ConfigError for stacked experts and for linears outside the layers, which do not support deltas.
        """
        delta = self.deltas.get(spec.name)
        if delta is None:
            return linear
        if not isinstance(linear, LinearOp) or not spec.name.startswith("layers."):
            what = "stacked experts" if spec.num_experts else "linears outside the layers"
            raise ConfigError(f"{spec.name}: adapters of {what} are not supported.", cure="Use adapters of attention and MLP linears only.")
        (adapters, low, size), (_, out, _) = delta.a.shape, delta.b.shape
        if (size, out) != (spec.in_features, spec.out_features) or delta.b.shape != (adapters, out, low):
            shapes = f"A {list(delta.a.shape)} and B {list(delta.b.shape)}"
            wanted = f"[adapters, rank, {spec.in_features}] and [adapters, {spec.out_features}, rank]"
            raise ConfigError(f"{spec.name}: the adapters have {shapes}, which must be {wanted}.", cure="Use adapters of this model.")
        return LowRankLinear(linear, shard_delta(delta, spec, sharding, rank), self)


class LowRankLinear(LinearOp):
    """`base` with a low-rank delta. Rows without an adapter have the bits of `base`.

    A gate is not linear, so the base linear of gated rows is computed twice in steps with adapters: with the gate for rows without an
    adapter, and without it for the others.
    """

    __slots__ = ("adapters", "base", "delta")

    def __init__(self, base: LinearOp, delta: LowRankDelta, adapters: Adapters) -> None:
        self.base, self.delta, self.adapters = base, delta, adapters

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        ids, plain = self.adapters.ids, self.base(x, fusion)
        if ids is None:
            return plain
        before = replace(fusion, gate=None, residual=None)
        delta = self.delta(ops.around(x, before, lambda rows: rows), ids)
        if fusion.gate is None:
            adapted = plain + delta
        else:
            adapted = ops.gated(self.base(x, before) + delta, fusion.gate)
            adapted = adapted if fusion.residual is None else adapted + fusion.residual
        return torch.where((ids >= 0)[:, None], adapted, plain)

    @property
    def packed_weight(self) -> PackedWeight | None:
        """The packed weight of `base`. Fused layers use it only in steps without adapters."""
        return self.base.packed_weight

    @property
    def min_input_gate_rows(self) -> float:
        return self.base.min_input_gate_rows


def shard_delta(delta: LowRankDelta, spec: LinearSpec, sharding: Sharding, rank: int) -> LowRankDelta:
    """One rank's shard of a delta: the columns of A for the rank's input features, the rows of B for its output features.

    Where ranks hold different input features, their results are summands of B A x and are summed together with those of W x.
    """
    a = _cut(delta.a, 2, column_slices(spec, sharding, rank))
    return LowRankDelta(a, _cut(delta.b, 1, row_slices(spec, sharding, rank)), delta.scaling)


def _cut(tensor: Tensor, axis: int, slices: Iterable[AxisSlice]) -> Tensor:
    """The given slices of one axis, concatenated. A slice with start -1 is filled with zeros."""
    parts = []
    for start, length in slices:
        shape = list(tensor.shape)
        shape[axis] = length
        parts.append(tensor.narrow(axis, start, length) if start >= 0 else tensor.new_zeros(shape))
    return torch.cat(parts, dim=axis)
