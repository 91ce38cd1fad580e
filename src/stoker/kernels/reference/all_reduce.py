"""Sums over ranks, and the residual added after them."""

from __future__ import annotations

from torch import Tensor

from stoker.distributed.group import Group


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    total = group.all_reduce(x)
    return total if residual is None else total + residual
