"""A block's last linear: its ranks' summands joined, and the residual added where that is cheapest."""

from __future__ import annotations

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels.types import Fusion
from stoker.quant.format import LinearOp


def joined(linear: LinearOp, x: Tensor, group: Group, residual: Tensor | None) -> Tensor:
    """The sum over the ranks of linear(x), + residual. One rank adds it inside the linear's kernel."""
    if residual is None:
        return group.all_reduce(linear(x))
    if group.size == 1:
        return linear(x, Fusion(residual=residual))
    return group.all_reduce(linear(x)) + residual
