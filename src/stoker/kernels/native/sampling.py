"""Greedy sampling and the verification of drafts by C kernels (sample.c, verify.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.native.library import GREEDY, VERIFY, kernels
from stoker.kernels.native.linear import ACTIVATION_DTYPES
from stoker.kernels.reference import sampling as reference
from stoker.kernels.reference.sampling import largest_of_shard, largest_over_ranks, logprobs
from stoker.kernels.types import DrawParams

__all__ = ["largest_of_shard", "largest_over_ranks", "logprobs", "sample", "verify"]


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


def verify(
    sampled: Tensor, token_ids: Tensor, logits_idx: Tensor, starts: Tensor, parents: Tensor, masks: Tensor, max_drafts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept drafts that equal the sampled tokens (`ops.verify`) by the C kernel, or by the reference for other types of tensors."""
    library, inputs = kernels(), (sampled, token_ids, logits_idx, starts, parents, masks)
    is_supported = masks.dtype == torch.int64 and all(tensor.dtype == torch.int32 for tensor in inputs[:-1])
    if isinstance(library, str) or not is_supported or not all(tensor.is_contiguous() for tensor in inputs):
        return reference.verify(*inputs, max_drafts)
    count = len(starts) - 1
    ids = torch.empty(count, max_drafts + 1, dtype=torch.int32)
    num_accepted, newest, last = torch.empty(3, count, dtype=torch.int32).unbind()
    is_yielded = torch.zeros(len(sampled), dtype=torch.bool)
    outputs = ids, num_accepted, newest, last, is_yielded
    pointers = [tensor.data_ptr() for tensor in inputs] + [count, max_drafts] + [tensor.data_ptr() for tensor in outputs]
    return reference.verify(*inputs, max_drafts) if library.verify(VERIFY(*pointers)) else outputs
