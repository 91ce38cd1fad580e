"""Dense linears in plain PyTorch, and the operations that are fused around a linear."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.activation import gated
from stoker.kernels.reference.norm import norm
from stoker.kernels.types import PLAIN, Fusion


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """x × weightᵀ + bias with `fusion` (`ops.linear`)."""
    if fusion.residual is not None and bias is None and fusion.gate is None:
        return torch.addmm(fusion.residual, before(x, fusion), weight.t())
    return around(x, fusion, lambda rows: F.linear(rows, weight, bias))


@cache
def format_reference(name: str) -> ModuleType:
    """The module `quant_<name>` of this package: the reference for the weight format `name`."""
    return import_module(f"stoker.kernels.reference.quant_{name}")


def around(x: Tensor, fusion: Fusion, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply the fusion's input gate and norm, then `product`, then the fusion's output gate and residual."""
    return after(product(before(x, fusion)), fusion)


def before(x: Tensor, fusion: Fusion) -> Tensor:
    """x after the fusion's input gate and norm: the input of the product."""
    if fusion.input_gate is not None:
        x = gated(x, fusion.input_gate)
    return x if fusion.norm_kind is None else norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)


def after(y: Tensor, fusion: Fusion) -> Tensor:
    """y after the fusion's output gate and residual, where y is the product."""
    if fusion.gate is not None:
        y = gated(y, fusion.gate)
    return y if fusion.residual is None else y + fusion.residual
