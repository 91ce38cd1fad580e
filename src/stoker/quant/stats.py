"""What calibration measures of a linear's input, and all that the calibrated formats need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLES = 256  # rows that are kept
EACH = 8  # of a call


@dataclass(slots=True)
class InputStats:
    """Sums over the calibration tokens of a linear's input x [T, in]. Stacked experts share theirs: all rows that reached any of them."""

    gram: Tensor  # float32 [in, in]: the sum of x xᵀ
    sum_abs: Tensor  # float32 [in]
    amax: Tensor  # float32 [in]: the largest magnitude
    sample: Tensor  # float32 [n, in]: some of the rows
    count: int = 0

    @staticmethod
    def zeros(in_features: int, device: torch.device) -> InputStats:
        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return InputStats(make(in_features, in_features), make(in_features), make(in_features), make(0, in_features))

    def add(self, x: Tensor) -> None:
        """Count the rows of x [T, in]."""
        wide = x.float()
        magnitude = wide.abs()
        self.gram.addmm_(wide.t(), wide)
        self.sum_abs += magnitude.sum(0)
        if len(wide):
            self.amax = torch.maximum(self.amax, magnitude.amax(0))
        self.count += len(wide)
        step = -(-len(wide) // EACH)
        if (room := SAMPLES - len(self.sample)) > 0 and step:
            self.sample = torch.cat((self.sample, wide[step // 2 :: step][:room]))

    @property
    def mean_abs(self) -> Tensor:
        return self.sum_abs / max(self.count, 1)

    @property
    def mean_square(self) -> Tensor:
        return self.gram.diagonal() / max(self.count, 1)

    def divided(self, factors: Tensor) -> InputStats:
        """Of x ÷ factors [in]."""
        gram = self.gram / factors[:, None] / factors
        return InputStats(gram, self.sum_abs / factors, self.amax / factors, self.sample / factors, self.count)

    def blocks(self, group_size: int) -> Tensor:
        """[groups, group_size, group_size]: the mean of x xᵀ within each group; a ragged last one is filled with zeros."""
        size = self.gram.shape[0]
        padded = torch.nn.functional.pad(self.gram, (0, -size % group_size, 0, -size % group_size)) / max(self.count, 1)
        count = padded.shape[0] // group_size
        return padded.view(count, group_size, count, group_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
