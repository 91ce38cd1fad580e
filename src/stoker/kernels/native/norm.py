"""RMS norm and layer norm by the C kernel (norm.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.native.library import NORM, NORMS, kernels, tensor_info
from stoker.kernels.native.linear import ACTIVATION_DTYPES, is_vector
from stoker.kernels.reference import norm as reference


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """The norm over the last axis (`ops.norm`) by the C kernel where it is supported, otherwise by the reference."""
    y = _norm(x, weight, bias, eps, kind)
    return reference.norm(x, weight, bias, eps, kind) if y is None else y


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor | None:
    """The norm of x [T, size] or [T, heads, size], or None when the kernel does not support the arguments."""
    library, dtype, factors, added = (
        kernels(),
        ACTIVATION_DTYPES.get(x.dtype, -1),
        tensor_info(weight),
        tensor_info(bias if kind == "layer" else None),
    )
    if isinstance(library, str) or dtype < 0 or x.dim() not in (2, 3) or x.stride(-1) != 1:
        return None
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    if not (is_vector(factors, size) and is_vector(added, size)):
        return None
    y = torch.empty(x.shape, dtype=x.dtype)
    status = library.norm(
        NORM(
            library.fork,
            torch.get_num_threads(),
            x.data_ptr(),
            y.data_ptr(),
            factors.address,
            added.address,
            x.shape[0],
            heads,
            size,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            dtype,
            factors.dtype,
            added.dtype,
            NORMS[kind],
            eps,
        )
    )
    return None if status else y
