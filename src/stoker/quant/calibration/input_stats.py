"""Statistics of a linear's input, measured by calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SAMPLE_ROWS = 256
SAMPLE_ROWS_PER_CALL = 8


@dataclass(slots=True)
class InputStats:
    """Sums of a linear's inputs x [T, in] over all calibration tokens.

    Stacked experts share one object: it covers the rows that reached any of them.
    """

    gram: Tensor  # float32 [in, in]: the sum of x xᵀ
    sum_abs: Tensor  # float32 [in]
    amax: Tensor  # float32 [in]: the largest magnitudes
    sample: Tensor  # float32 [n, in]: sampled rows
    count: int = 0

    @staticmethod
    def zeros(in_features: int, device: torch.device) -> InputStats:
        """Statistics without any token."""

        def zero(*shape: int) -> Tensor:
            """A float32 tensor of zeros on the device."""
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return InputStats(zero(in_features, in_features), zero(in_features), zero(in_features), zero(0, in_features))

    def add(self, x: Tensor) -> None:
        """Add the rows of x [T, in]."""
        wide = x.float()
        magnitude = wide.abs()
        self.gram.addmm_(wide.t(), wide)
        self.sum_abs += magnitude.sum(0)
        if len(wide):
            self.amax = torch.maximum(self.amax, magnitude.amax(0))
        self.count += len(wide)
        stride = -(-len(wide) // SAMPLE_ROWS_PER_CALL)
        if (room := MAX_SAMPLE_ROWS - len(self.sample)) > 0 and stride:
            self.sample = torch.cat((self.sample, wide[stride // 2 :: stride][:room]))

    @property
    def mean_abs(self) -> Tensor:
        """float32 [in]: the mean magnitudes."""
        return self.sum_abs / max(self.count, 1)

    @property
    def mean_square(self) -> Tensor:
        """float32 [in]: the mean squares."""
        return self.gram.diagonal() / max(self.count, 1)

    def divided_by(self, factors: Tensor) -> InputStats:
        """The statistics that x ÷ factors [in] would have."""
        gram = self.gram / factors[:, None] / factors
        return InputStats(gram, self.sum_abs / factors, self.amax / factors, self.sample / factors, self.count)

    def blocks(self, group_size: int) -> Tensor:
        """[groups, group_size, group_size]: the mean of x xᵀ within each group of features. A shorter last group is filled with zeros."""
        size = self.gram.shape[0]
        padded = torch.nn.functional.pad(self.gram, (0, -size % group_size, 0, -size % group_size)) / max(self.count, 1)
        count = padded.shape[0] // group_size
        return padded.view(count, group_size, count, group_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
