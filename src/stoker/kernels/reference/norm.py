"""RMS norm and layer norm in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """RMS or layer norm over the last axis, computed in float32 or, for float64 input, in float64 (`ops.norm`)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = None if weight is None else weight.to(wide)
    if kind == "rms":
        return F.rms_norm(x.to(wide), x.shape[-1:], weight, eps).to(x.dtype)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, None if bias is None else bias.to(wide), eps).to(x.dtype)
