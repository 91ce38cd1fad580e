"""A block's last linear: its ranks' summands joined, and the residual added where that is cheapest."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels.types import PLAIN, Fusion
from stoker.quant.format import LinearOp


def joined(linear: LinearOp, x: Tensor, group: Group, residual: Tensor | None, fusion: Fusion = PLAIN) -> Tensor:
    """The sum over the ranks of linear(x), + residual. One of them adds it, inside its linear's kernel, so the sum has it once."""
    if residual is not None and group.rank == 0:
        fusion = replace(fusion, residual=residual)
    return group.all_reduce(linear(x, fusion))
