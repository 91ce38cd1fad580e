"""A block's last linear: its ranks' summands joined, and the residual added where that is cheapest."""

from __future__ import annotations

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels.types import Fusion
from stoker.quant.format import LinearOp


def joined(linear: LinearOp, x: Tensor, group: Group, residual: Tensor | None) -> Tensor:
    """The sum over the ranks of linear(x), + residual. One of them adds it, inside its linear's kernel, so the sum has it once."""
    if residual is None or group.rank != 0:
        return group.all_reduce(linear(x))
    return group.all_reduce(linear(x, Fusion(residual=residual)))
