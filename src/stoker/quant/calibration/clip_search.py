"""Clip search: finds the scale and base of each int4 group with the least squared error of the outputs or, unmeasured, of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.quant import groups
from stoker.quant.groups import Zero

NUM_CLIPS = 10  # candidates
MAX_CLIP = 0.5  # the candidates clip less than this fraction of a group's extremes
NUM_REFINEMENTS = 2  # least-squares iterations after the search


def search_clip(split: Tensor, zero: Zero, dtype: torch.dtype, blocks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, base), each [..., out, groups, 1], for the groups `split` [..., out, groups, group_size]; see `groups.grid`.

    `blocks` [groups, group_size, group_size] is the mean of x xᵀ within each group. After clipping the extremes by several fractions, the
    scale is replaced by the least-squares scale of the quantized values, which are then rounded again, where that reduces the error.
    """
    best = _BestGrid(split, zero, blocks)
    for step in range(NUM_CLIPS):
        best.update(*groups.grid(*groups.bounds(split, zero, 1 - MAX_CLIP * step / NUM_CLIPS), zero, dtype))
    for _ in range(NUM_REFINEMENTS):
        best.update(best.least_squares_scale(dtype), best.base)
        for shift in (-1.0, 1.0) if zero == "int" else ():
            best.update(best.scale, (best.base + shift).clamp(0, 15))
    return best.scale, best.base


class _BestGrid:
    """The scale and base with the least error of each group, among all that were tried.

    split: weights, divided into groups of n input features [..., groups, n]. blocks: for each group the matrix [n, n] of mean products of
    its inputs, by which the error of the weights becomes that of the outputs. None: the error of the weights counts.
    """

    def __init__(self, split: Tensor, zero: Zero, blocks: Tensor | None) -> None:
        self.split, self.zero, self.blocks = split, zero, blocks
        self.error = split.new_full((*split.shape[:-1], 1), torch.inf)
        self.scale, self.base = torch.zeros_like(self.error), torch.zeros_like(self.error)

    def update(self, scale: Tensor, base: Tensor) -> None:
        """Try a scale and base: they replace those of the groups whose error they reduce."""
        error = groups.dequantize(groups.quantize(self.split, scale, base, self.zero), scale, base, self.zero).sub_(self.split)
        squared = self._weighted(error).mul_(error).sum(-1, keepdim=True)
        is_better = squared < self.error
        self.error = torch.where(is_better, squared, self.error)
        self.scale, self.base = torch.where(is_better, scale, self.scale), torch.where(is_better, base, self.base)

    def least_squares_scale(self, dtype: torch.dtype) -> Tensor:
        """The scale that minimizes the squared error of the quantized values of the best grid."""
        values = groups.quantize(self.split, self.scale, self.base, self.zero)
        target = self.split
        if self.zero == "float":
            target = target - self.base
        else:
            values -= self.base
        weighted = self._weighted(values)
        numerator, denominator = (weighted * target).sum(-1, keepdim=True), (weighted * values).sum(-1, keepdim=True)
        scale = torch.where(denominator > 0, numerator / denominator.clamp(min=1e-30), self.scale)
        return torch.where(scale > 0, scale, self.scale).clamp(min=torch.finfo(dtype).smallest_normal).to(dtype).float()

    def _weighted(self, values: Tensor) -> Tensor:
        """The matrix product of the values of each group and its matrix in `blocks`.

        Without `blocks`, a copy, which the caller may change.
        """
        if self.blocks is None:
            return values.clone()
        return torch.einsum("...gi,gij->...gj", values, self.blocks)
