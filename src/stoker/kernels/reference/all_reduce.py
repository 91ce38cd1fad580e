"""Sums over ranks, and what follows them, one after another."""

from __future__ import annotations

from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels.reference import norm as norms


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    total = group.all_reduce(x)
    return total if residual is None else total + residual


def all_reduce_norm(
    x: Tensor, group: Group, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    return norms.add_norm(group.all_reduce(x), residual, weight, bias, eps, kind)
