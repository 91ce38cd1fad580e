"""All-reduce over the ranks of a group by its own collective, with the residual added after it."""

from __future__ import annotations

from torch import Tensor

from stoker.distributed.group import Group


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    """The sum of x over the group, + `residual` (`ops.all_reduce`)."""
    total = group.all_reduce(x)
    return total if residual is None else total + residual
