"""A block's last linear: the ranks' summands and the residual, joined where that is cheapest."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion
from stoker.quant.linear_ops import LinearOp


def joined(linear: LinearOp, x: Tensor, group: Group, residual: Tensor | None, fusion: Fusion = PLAIN) -> Tensor:
    """The sum over the ranks of linear(x), + residual. A single rank adds it inside the linear's kernel."""
    if group.size == 1:
        if residual is not None:  # replace() is slow, and a step on a CPU feels it
            fusion = Fusion(residual=residual) if fusion is PLAIN else replace(fusion, residual=residual)
        return linear(x, fusion)
    return ops.all_reduce(linear(x, fusion), group, residual)
