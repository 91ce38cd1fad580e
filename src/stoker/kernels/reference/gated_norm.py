"""The gated RMS norm after a recurrence, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, gate_first: bool) -> Tensor:
    """[T, C] (`ops.gated_norm`). The normalized features are rounded to the dtype of x before they are multiplied by the weight."""
    wide, factor = x.float(), F.silu(gate.float())
    if gate_first:
        wide = wide * factor
    groups = wide.unflatten(-1, (num_groups, -1))
    groups = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    out = groups.flatten(-2) * weight if weight.shape[0] == x.shape[-1] else (groups * weight).flatten(-2)
    return out if gate_first else (out.float() * factor).to(x.dtype)
