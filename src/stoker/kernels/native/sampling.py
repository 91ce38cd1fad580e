"""Greedy sampling by the C kernel (sample.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.native.library import GREEDY, kernels
from stoker.kernels.native.linear import ACTIVATION_DTYPES
from stoker.kernels.reference import sampling as reference
from stoker.kernels.reference.sampling import logprobs, verify
from stoker.kernels.types import DrawParams

__all__ = ["logprobs", "sample", "verify"]


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """Token ids (`ops.sample`) by the C kernel if all rows are greedy, otherwise by the reference."""
    token_ids = _greedy(logits) if params.all_greedy else None
    return reference.sample(logits, params) if token_ids is None else token_ids


def _greedy(logits: Tensor) -> Tensor | None:
    """The largest logit's index in each row, or None when the kernel does not support the logits."""
    library, dtype = kernels(), ACTIVATION_DTYPES.get(logits.dtype, -1)
    if isinstance(library, str) or dtype < 0 or logits.stride(1) != 1 or not logits.shape[1]:
        return None
    (rows, size), out = logits.shape, torch.empty(logits.shape[0], dtype=torch.int32)
    arguments = GREEDY(library.fork, torch.get_num_threads(), logits.data_ptr(), out.data_ptr(), rows, size, logits.stride(0), dtype)
    return None if library.greedy(arguments) else out
