"""The end of a sum over ranks that ran beside other kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def add_summands(summands: tuple[Tensor, ...], residual: Tensor, out: Tensor) -> None:
    """out = the sum of one or two summands, rounded to their dtype, + residual (`ops.add_summands`)."""
    total = summands[0] if len(summands) == 1 else summands[0] + summands[1]
    torch.add(total, residual, out=out)
