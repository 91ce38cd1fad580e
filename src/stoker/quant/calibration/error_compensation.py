"""Error compensation (GPTQ, arXiv 2210.17323): columns are rounded one by one, and later columns correct the error of earlier ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.quant.calibration.input_stats import InputStats

BLOCK_COLUMNS = 128  # after which the errors of a block are applied to the rest of the matrix in one product

# (values [out, n], indices [n] of their columns in the weight) → the nearest values that the format can store.
Rounding = Callable[[Tensor, Tensor], Tensor]


class ErrorCompensation:
    """How columns of a linear correct each other's rounding errors. It serves all matrices with the same input.

    It is computed from the second moment of the input, to whose diagonal `damping` × the mean diagonal is added. With `act_order`, columns
    are rounded in the order of the size of their inputs, largest first. Raises ConfigError when the second moment has no inverse.
    """

    def __init__(self, stats: InputStats, damping: float, act_order: bool) -> None:
        gram = stats.gram / max(stats.count, 1)
        columns = torch.arange(len(gram), device=gram.device)
        self.order = gram.diagonal().argsort(descending=True) if act_order else columns
        self.inverse = _inverse_factor(gram[self.order][:, self.order], damping)

    def remaining_error(self) -> Tensor:
        """float32 [in]: the part of a unit of squared error in each column that remains after all later columns have corrected it."""
        return torch.empty_like(self.inverse[0]).index_copy_(0, self.order, self.inverse.diagonal().square().reciprocal())

    def round(self, weight: Tensor, rounding: Rounding, step: int = 1) -> Tensor:
        """float32 [out, in]: `weight` rounded by `rounding` so that the error of the linear's outputs is small.

        `step` columns are rounded at once and do not correct each other.
        """
        remaining = weight.float()[:, self.order]
        size, inverse, rounded = remaining.shape[1], self.inverse, torch.empty_like(remaining)
        for start in range(0, size, BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, size)
            errors = torch.empty_like(remaining[:, start:stop])
            for first in range(start, stop, step):
                last = min(first + step, stop)
                rounded[:, first:last] = rounding(remaining[:, first:last], self.order[first:last])
                diagonal = torch.linalg.inv(inverse[first:last, first:last])
                error = (remaining[:, first:last] - rounded[:, first:last]) @ diagonal
                remaining[:, last:stop] -= error @ inverse[first:last, last:stop]
                errors[:, first - start : last - start] = error
            remaining[:, stop:] -= errors @ inverse[start:stop, stop:]
        return torch.empty_like(rounded).index_copy_(1, self.order, rounded)


def compensate_errors(
    weight: Tensor, scale: Tensor, stats: InputStats, damping: float, step: int, quantize: Callable[[Tensor], Tensor]
) -> Tensor:
    """float32 [(experts,) out, in]: `weight` rounded with error compensation.

    The values of a row are multiples of its `scale` [(experts,) out, 1]. `quantize` rounds values in units of the scale.
    """
    compensation = ErrorCompensation(stats, damping, act_order=True)

    def matrix(values: Tensor, units: Tensor) -> Tensor:
        """One matrix [out, in] rounded to multiples of its units [out, 1]."""
        return compensation.round(values, lambda columns, _: quantize(columns / units).float() * units, step)

    if weight.dim() == 2:
        return matrix(weight, scale)
    return torch.stack([matrix(*expert) for expert in zip(weight, scale, strict=True)])


def _inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of `gram`. Damping is raised up to 10,000 times where necessary; then raises ConfigError."""
    mean = gram.diagonal().mean().clamp(min=1e-12)
    for power in range(5):
        damped = gram + torch.eye(len(gram), device=gram.device) * mean * damping * 10**power
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not int(failed):
                return upper
    raise ConfigError("The second moments of the calibration inputs have no inverse.", cure="Use more calibration data, or AWQ.")
