"""Activation functions in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.types import Gate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation function applied to each element of x (`ops.activate`). Raises KeyError for an unknown name."""
    return ACTIVATIONS[activation](x)


def gated(gate_up: Tensor, kind: Gate) -> Tensor:
    """act(gate) × up, of the two halves of gate_up (`ops.gated`)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(kind, str):
        return ACTIVATIONS[kind](gate).mul_(up)
    gate = gate.clamp(max=kind.limit)
    return (up.clamp(-kind.limit, kind.limit) + 1) * gate * torch.sigmoid(kind.alpha * gate)


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """xIELU with learned parameters (`ops.xielu`)."""
    alpha_p, alpha_n, beta, eps = parameters
    wide = x.float()
    positive = alpha_p * wide.square() + beta * wide
    negative = alpha_n * (torch.expm1(torch.minimum(wide, eps)) - wide) + beta * wide
    return torch.where(wide > 0, positive, negative).to(x.dtype)
