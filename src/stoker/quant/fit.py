"""The scale and zero of each group with the least squared error: of its output where inputs were measured, else of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.quant import groups
from stoker.quant.groups import Zero

CLIPS = 10  # steps of the clip search
MOST_CLIP = 0.5  # of a group's extremes is the most that the search gives up
REFINEMENTS = 2  # rounds of least squares after it


def fit(split: Tensor, zero: Zero, dtype: torch.dtype, blocks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, base) [..., out, groups, 1] of groups [..., out, groups, group_size], as `groups.grid` gives them.

    `blocks` [groups, group_size, group_size] is the mean of x xᵀ within each group. First the extremes are clipped by steps; then the
    scale is the least-squares one for the codes found, which are rounded again, as long as that helps.
    """
    best = _Best(split, zero, blocks)
    for step in range(CLIPS):
        best.offer(*groups.grid(*groups.bounds(split, zero, 1 - MOST_CLIP * step / CLIPS), zero, dtype))
    for _ in range(REFINEMENTS):
        best.offer(best.least_squares(dtype), best.base)
        for shift in (-1.0, 1.0) if zero == "int" else ():
            best.offer(best.scale, (best.base + shift).clamp(0, 15))
    return best.scale, best.base


class _Best:
    """The best grid so far of each group."""

    def __init__(self, split: Tensor, zero: Zero, blocks: Tensor | None) -> None:
        self.split, self.zero, self.blocks = split, zero, blocks
        self.error = split.new_full((*split.shape[:-1], 1), torch.inf)
        self.scale, self.base = torch.zeros_like(self.error), torch.zeros_like(self.error)

    def offer(self, scale: Tensor, base: Tensor) -> None:
        """Take the grid for the groups where it is better."""
        wrong = groups.decode(groups.encode(self.split, scale, base, self.zero), scale, base, self.zero).sub_(self.split)
        error = self._weighted(wrong).mul_(wrong).sum(-1, keepdim=True)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale, self.base = torch.where(better, scale, self.scale), torch.where(better, base, self.base)

    def least_squares(self, dtype: torch.dtype) -> Tensor:
        """The scale that fits the codes of the best grid."""
        codes = groups.encode(self.split, self.scale, self.base, self.zero)
        wanted = self.split
        if self.zero == "float":
            wanted = wanted - self.base
        else:
            codes -= self.base
        weighted = self._weighted(codes)
        top, bottom = (weighted * wanted).sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        found = torch.where(bottom > 0, top / bottom.clamp(min=1e-30), self.scale)
        return torch.where(found > 0, found, self.scale).clamp(min=torch.finfo(dtype).smallest_normal).to(dtype).float()

    def _weighted(self, values: Tensor) -> Tensor:
        """values × blocks, group by group."""
        if self.blocks is None:
            return values.clone()
        return torch.einsum("...gi,gij->...gj", values, self.blocks)
