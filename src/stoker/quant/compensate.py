"""Rounding column by column, each column's error spread over those still to come (GPTQ, arXiv 2210.17323): for any grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.quant.stats import InputStats

BLOCK = 128  # columns whose errors reach the rest of the matrix in one product

# (values [out, n], which columns of the weight they are [n]) → the nearest values that can be stored.
Rounding = Callable[[Tensor, Tensor], Tensor]


class Compensation:
    """What the inputs of a linear say of how errors make up for each other; the same for all matrices that read them.

    `damp` of the mean diagonal is added to the diagonal of the second moment. With `act_order` columns are taken by the size of their
    inputs, largest first. Raises ConfigError when the second moment has no inverse.
    """

    def __init__(self, stats: InputStats, damp: float, act_order: bool) -> None:
        gram = stats.gram / max(stats.count, 1)
        every = torch.arange(len(gram), device=gram.device)
        self.order = gram.diagonal().argsort(descending=True) if act_order else every
        self.inverse = _inverse(gram[self.order][:, self.order], damp)  # upper Cholesky factor of the second moment's inverse

    def lasting(self) -> Tensor:
        """float32 [in]: what is left of a unit of squared error in each column, after all later columns have made up for it."""
        return torch.empty_like(self.inverse[0]).index_copy_(0, self.order, self.inverse.diagonal().square().reciprocal())

    def round(self, weight: Tensor, rounding: Rounding, step: int = 1) -> Tensor:
        """float32 [out, in]: `weight` on the grid of `rounding`, with the least error of its output that one pass finds.

        `step` columns are rounded together, without making up for each other.
        """
        left = weight.float()[:, self.order]
        size, inverse, found = left.shape[1], self.inverse, torch.empty_like(left)
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            errors = torch.empty_like(left[:, start:stop])
            for first in range(start, stop, step):
                last = min(first + step, stop)
                found[:, first:last] = rounding(left[:, first:last], self.order[first:last])
                own = torch.linalg.inv(inverse[first:last, first:last])
                error = (left[:, first:last] - found[:, first:last]) @ own
                left[:, last:stop] -= error @ inverse[first:last, last:stop]
                errors[:, first - start : last - start] = error
            left[:, stop:] -= errors @ inverse[start:stop, stop:]
        return torch.empty_like(found).index_copy_(1, self.order, found)


def compensated(weight: Tensor, scale: Tensor, stats: InputStats, damp: float, step: int, codes: Callable[[Tensor], Tensor]) -> Tensor:
    """float32 [(experts,) out, in]: `weight` rounded so, each row in units of its `scale` [(experts,) out, 1] that `codes` rounds."""
    by = Compensation(stats, damp, act_order=True)

    def matrix(values: Tensor, units: Tensor) -> Tensor:
        return by.round(values, lambda columns, _: codes(columns / units).float() * units, step)

    if weight.dim() == 2:
        return matrix(weight, scale)
    return torch.stack([matrix(*expert) for expert in zip(weight, scale, strict=True)])


def _inverse(gram: Tensor, damp: float) -> Tensor:
    mean = gram.diagonal().mean().clamp(min=1e-12)
    for power in range(5):
        damped = gram + torch.eye(len(gram), device=gram.device) * mean * damp * 10**power
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not int(failed):
                return upper
    raise ConfigError("The calibration inputs' second moments have no inverse.", cure="Use more calibration data, or AWQ.")
