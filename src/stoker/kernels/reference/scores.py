"""How well logits predict tokens, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.types import Fusion, TokenScores

# Rows whose logits are computed at a time: as many as have 32 MiB of them, which malloc reuses without new pages, but at least 128.
MIN_ROWS, LOGITS_BYTES = 128, 32 << 20


def score_tokens(
    x: Tensor,
    weight: PackedWeight,
    targets: Tensor,
    fusion: Fusion,
    scale: float,
    softcap: float | None,
    linear: Callable[[Tensor, PackedWeight, Fusion], Tensor],
) -> TokenScores:
    """The scores of `targets` (`ops.score_tokens`). `linear` computes the product."""
    likelihoods, best = [], []
    for start in range(0, x.shape[0], max(MIN_ROWS, LOGITS_BYTES // (4 * weight.out_features))):
        rows = slice(start, start + max(MIN_ROWS, LOGITS_BYTES // (4 * weight.out_features)))
        logits = linear(x[rows], weight, fusion)
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        likelihoods.append(-F.cross_entropy(logits.float(), targets[rows].long(), reduction="none"))
        best.append(logits.argmax(dim=-1).int())
    return TokenScores(torch.cat(likelihoods), torch.cat(best))
