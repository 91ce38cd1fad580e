"""Copies of the states of whole slots, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

COPIED_SLOTS = 2  # whose states are copied at the same time


def copy_states(storage: Tensor, pairs: Tensor) -> None:
    """Copy slot pairs[i, 0] to slot pairs[i, 1] for each i (`ops.copy_states`)."""
    # In parts, because sequences that began together are saved together, and a copy of all their states is not in the memory plan.
    for part in pairs.split(COPIED_SLOTS):
        source, target = part.long().unbind(1)
        storage.index_copy_(0, target, storage.index_select(0, source))
