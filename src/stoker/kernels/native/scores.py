"""Scores of tokens by the C kernel (score.c), which computes logits without storing them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.library import CALL_ARGUMENTS, SCORING, kernels
from stoker.kernels.native.linear import ACTIVATION_DTYPES, NativeWeight, dense_weight, fp8_weight, pack_linear
from stoker.kernels.reference import scores as reference
from stoker.kernels.types import Fusion, TokenScores

_NATIVE_WEIGHTS: dict[str, Callable[[PackedWeight], NativeWeight | None]] = {
    "dense": lambda weight: dense_weight(weight.values),
    "fp8": fp8_weight,
}


def score_tokens(
    x: Tensor,
    weight: PackedWeight,
    targets: Tensor,
    fusion: Fusion,
    scale: float,
    softcap: float | None,
    linear: Callable[[Tensor, PackedWeight, Fusion], Tensor],
) -> TokenScores:
    """The scores of `targets` (`ops.score_tokens`) by the C kernel where it supports the weight, otherwise by the reference."""
    native = _NATIVE_WEIGHTS.get(weight.format, lambda _: None)(weight)
    scores = None if native is None or weight.column_order is not None else _score(x, native, weight.bias, targets, fusion, scale, softcap)
    return reference.score_tokens(x, weight, targets, fusion, scale, softcap, linear) if scores is None else scores


def _score(
    x: Tensor, weight: NativeWeight, bias: Tensor | None, targets: Tensor, fusion: Fusion, scale: float, softcap: float | None
) -> TokenScores | None:
    """The scores, or None when the kernel does not support the arguments."""
    library, dtype, packed = kernels(), ACTIVATION_DTYPES.get(x.dtype, -1), pack_linear(weight, bias, fusion)
    if isinstance(library, str) or dtype < 0 or x.dim() != 2 or x.stride(1) != 1 or packed is None or x.shape[1] != packed.inputs:
        return None
    rows, targets = x.shape[0], targets.int().contiguous()
    scores = TokenScores(torch.empty(rows), torch.empty(rows, dtype=torch.int32))
    pointers = (targets.data_ptr(), scores.likelihoods.data_ptr(), scores.best.data_ptr())
    header = SCORING(library.fork, torch.get_num_threads(), *pointers, scale, softcap or 0.0)
    status = library.score(header + CALL_ARGUMENTS(x.data_ptr(), 0, 0, rows, x.stride(0), dtype) + packed.packed)
    return None if status else scores
