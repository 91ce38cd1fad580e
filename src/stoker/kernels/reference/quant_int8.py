"""Linears with int8 weights in plain torch: activations as they are (weight-only), or in int8 too (W8A8).

Integer products run in PyTorch's own int8 kernel (oneDNN) on the CPU, which is exact where the processor has VNNI.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion

_COARSE = 254.0  # units of the fine digit in one of the coarse: both stay within ± 127


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    return around(x, fusion, lambda rows: _int8(rows, weight, scale, bias))


def int8_embedding(token_ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    ids = token_ids.long()
    return (weight[ids].float() * scale[ids, None]).to(dtype)


def w8a8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None = None,
    fusion: Fusion = PLAIN,
) -> Tensor:
    def product(rows: Tensor) -> Tensor:
        wide = rows.float()
        step = input_scale if input_scale is not None else wide.abs().amax(dim=-1, keepdim=True) / 127
        step = step.clamp(min=1e-12)
        codes = (wide / step).round_().clamp_(-127, 127).to(torch.int8)
        return _finish(_integer_product(codes, weight).mul_(step), scale, bias, rows.dtype)

    return around(x, fusion, product)


def _int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    if not (x.device.type == "cpu" and exact_integers()):
        # Widening the weight for every call is slow: processors without VNNI, and the oracle on other devices.
        return _finish(F.linear(x.float(), weight.float()), scale, bias, x.dtype)
    # Each activation as two int8 digits, coarse × 254 + fine: 15 bits and a sign, so the product is nearly float32's, and the
    # weights are read once for both. A row's result does not depend on its neighbours.
    count, wide = x.shape[0], x.float()
    step = wide.abs().amax(dim=-1, keepdim=True).div_(127 * _COARSE).clamp_(min=1e-30)
    units = wide / step
    coarse = (units / _COARSE).round_()
    digits = torch.cat((coarse, units.sub_(coarse, alpha=_COARSE).round_())).to(torch.int8)
    sums = _integer_product(digits, weight)
    return _finish(torch.add(sums[count:], sums[:count], alpha=_COARSE).mul_(step), scale, bias, x.dtype)


def _finish(sums: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = sums.mul_(scale)
    return (out if bias is None else out.add_(bias)).to(dtype)


def _integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """x int8 [M, K] × weight int8 [N, K] transposed, summed exactly, as float32."""
    if x.device.type == "cpu" and exact_integers():
        return torch._int_mm(x, weight.t()).float()
    return F.linear(x.double(), weight.double()).float()


@cache
def exact_integers() -> bool:
    """Whether the int8 product is exact here: older instructions saturate the sum of two products at 16 bits."""
    x, weight = torch.full((2, 64), 127, dtype=torch.int8), torch.full((32, 64), -127, dtype=torch.int8)
    return bool((torch._int_mm(x, weight.t()) == -64 * 127 * 127).all())
