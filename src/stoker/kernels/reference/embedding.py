"""Embedding lookup, and the token ids of overlapped steps, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resolve(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """Replace references to tokens that are still on the device (`ops.resolve`)."""
    return torch.where(token_ids < 0, last_ids[(-1 - token_ids).clamp(min=0)], token_ids)


def remember(last_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Store the sampled token of each row for the next step's `resolve` (`ops.remember`)."""
    last_ids.index_copy_(0, rows.long(), token_ids.clamp(min=0))


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` for `token_ids` (`ops.embedding`)."""
    return F.embedding(token_ids, table)
