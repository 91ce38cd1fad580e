"""Norms in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    wide = x.float()
    if kind == "rms":
        out = F.rms_norm(wide, x.shape[-1:], None if weight is None else weight.float(), eps)
    else:
        out = F.layer_norm(wide, x.shape[-1:], None if weight is None else weight.float(), None if bias is None else bias.float(), eps)
    return out.to(x.dtype)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total, weight, bias, eps, kind), total
