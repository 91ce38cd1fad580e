"""Between blocks: the ranks' summands, the residual, and the norm before the next block, joined where that is cheapest."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.norm import Norm
from stoker.quant.format import LinearOp


def joined(linear: LinearOp, x: Tensor, group: Group, residual: Tensor | None, fusion: Fusion = PLAIN) -> Tensor:
    """The sum over the ranks of linear(x), + residual. A single rank adds it inside the linear's kernel."""
    if group.size == 1:
        return linear(x, fusion if residual is None else replace(fusion, residual=residual))
    return ops.all_reduce(linear(x, fusion), group, residual)


def settled(x: Tensor, part: Tensor | None, group: Group) -> Tensor:
    """The stream, once what every rank has a `part` of is summed and added."""
    return x if part is None else ops.all_reduce(part, group, x)


def entered(x: Tensor, part: Tensor | None, norm: Norm, group: Group) -> tuple[Tensor, Tensor, Norm | None]:
    """The stream settled, what a block behind `norm` reads, and the norm that the block has still to apply to that.

    The sum's kernel norms whole rows for nothing. But one row is summed sooner in pieces, and its linears norm for nothing, too.
    """
    if part is None or x.shape[0] == 1:
        x = settled(x, part, group)
        return x, x, norm
    normed, x = ops.all_reduce_norm(part, group, x, norm.weight, norm.bias, norm.eps, norm.kind)
    return x, normed, None
