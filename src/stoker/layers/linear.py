"""The last linear of a block: the sum over ranks and the residual."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion
from stoker.quant.linear_ops import LinearOp


def linear_all_reduce(linear: LinearOp, x: Tensor, group: Group, residual: Tensor | None, fusion: Fusion = PLAIN) -> Tensor:
    """linear(x) summed over the ranks of `group`, + residual. On a single rank the kernel of the linear adds the residual."""
    if group.size == 1:
        if residual is not None:  # replace() takes microseconds, which a decode step on a CPU notices
            fusion = Fusion(residual=residual) if fusion is PLAIN else replace(fusion, residual=residual)
        return linear(x, fusion)
    return ops.all_reduce(linear(x, fusion), group, residual)
