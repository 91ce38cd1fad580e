"""Copies within the paged KV cache in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


def move_tokens(caches: list[KVCache], moves: Tensor) -> None:
    """Copy keys and values between slots (`ops.move_tokens`). All sources are read before the first target is written."""
    sources, targets = moves.long().unbind(1)
    for cache in caches:
        for pages in (cache.keys, cache.values):
            if pages is not None and pages.numel():
                stored, size = pages.view(torch.uint8), cache.block_size  # indexing does not support float8
                stored[targets // size, :, targets % size] = stored[sources // size, :, sources % size]
