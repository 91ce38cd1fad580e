"""AWQ (arXiv 2306.00978): int4 weights whose important input features are scaled up before rounding, and whose extremes are clipped.

The scaling is undone in what feeds the linear (a norm, or the rows of the linear before), so nothing is left to do at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.layers.specs import LinearSpec
from stoker.quant import groups
from stoker.quant.format import FORMATS
from stoker.quant.int4 import Int4
from stoker.quant.stats import InputStats

ALPHAS = 10  # exponents tried, from 0 to 1
MOST_ROWS = 512  # of the weight that the search looks at


class AWQ(Int4, frozen=True, kw_only=True, tag="awq"):
    """Stored as `Int4`."""

    @property
    def needs_calibration(self) -> bool:
        return True

    def smooth(self, weight: Tensor, spec: LinearSpec, stats: InputStats) -> Tensor | None:
        """Mean magnitude of the inputs to the power that leaves the least squared error of the output."""
        rows = weight.flatten(0, -2)
        rows = rows[:: -(-len(rows) // MOST_ROWS)].float()
        best, chosen = torch.inf, None
        for step in range(ALPHAS):
            factors = _factors(stats.mean_abs, step / ALPHAS)
            error = self._round(rows * factors).div_(factors).sub_(rows)
            found = float(((error @ stats.gram) * error).sum())
            if found < best:
                best, chosen = found, factors
        return chosen

    def _round(self, weight: Tensor) -> Tensor:
        split = groups.split(weight, self.group_size)
        scale, base = self.grid(split)
        return groups.join(groups.decode(groups.encode(split, scale, base, self.zero), scale, base, self.zero), weight.shape[-1])


def _factors(mean_abs: Tensor, alpha: float) -> Tensor:
    """mean_abs ** alpha around a middle of 1."""
    factors = mean_abs.clamp(min=1e-4).pow(alpha)
    return (factors / (factors.amax() * factors.amin()).sqrt()).clamp(1e-3, 1e3)


FORMATS.add("awq", AWQ)
