"""Linears with int8 weights in plain torch: activations as they are (weight-only), or in int8 too (W8A8).

Integer products run in PyTorch's own int8 kernel (oneDNN) on the CPU, which is exact where the processor has VNNI.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.quantized import GroupedInt8Weight
from stoker.kernels.reference.linear import after, around, before
from stoker.kernels.types import PLAIN, Fusion

_COARSE = 254.0  # units of the fine digit in one of the coarse: both stay within ± 127
_UNIT = 1 / (127.0 * _COARSE)  # of a row's largest activation
_ZERO = torch.tensor(0.0)
_DIGITS = torch.tensor([[[127.0]], [[127.0 * _COARSE]]])  # a row's largest activation, in units of each digit


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    rows = before(x, fusion)
    if fusion.gate is None:
        return _int8(rows, weight, scale, bias, fusion.residual)
    return after(_int8(rows, weight, scale, bias, None), fusion)


def takes_groups(weight: GroupedInt8Weight) -> bool:
    return False  # widened at load, products are faster


def grouped_int8_linear(x: Tensor, weight: GroupedInt8Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    wide = widen_groups(weight.codes, weight.scale, weight.offset, weight.group_size).to(x.dtype)
    return around(x, fusion, lambda rows: F.linear(rows, wide, bias))


def widen_groups(codes: Tensor, scale: Tensor, offset: Tensor | None, group_size: int) -> Tensor:
    """float32 [..., out, in] of int8 codes, and scales and offsets [..., out, groups]."""
    size = codes.shape[-1]
    real = F.pad(codes.float(), (0, -size % group_size)).unflatten(-1, (-1, group_size)).mul_(scale.float()[..., None])
    if offset is not None:
        real.add_(offset.float()[..., None])
    return real.flatten(-2)[..., :size]


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
        return _finish(_integer_product(codes, weight).mul_(step), 1.0, scale, bias, None, rows.dtype)

    return around(x, fusion, product)


def _int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if not (x.device.type == "cpu" and exact_integers()):
        # Widening the weight for every call is slow: processors without VNNI, and the oracle on other devices.
        return _finish(F.linear(x.float(), weight.float()), 1.0, scale, bias, residual, x.dtype)
    # Each activation as two int8 digits, coarse × 254 + fine: 15 bits and a sign, so the product is nearly float32's. A row's result
    # does not depend on its neighbours. A row of zeros has digits of no meaning, which are multiplied by zero in the end.
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    digits = wide * (_DIGITS / largest)
    coarse, fine = digits.unbind(0)
    fine.sub_(coarse.round_(), alpha=_COARSE).round_()
    # One product of both digits, so that the weight is read once: [3072, 576] out of memory takes 282 µs, row after row 317.
    coarse, fine = torch._int_mm(digits.to(torch.int8).flatten(0, 1), weight.t()).chunk(2)
    return _finish(fine.float().add_(coarse, alpha=_COARSE).mul_(largest), _UNIT, scale, bias, residual, x.dtype)


def _finish(sums: Tensor, unit: float, scale: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums × unit × scale + bias + residual, in as few operations as there are."""
    first, second = (bias, residual) if residual is None else (residual, bias)
    out = torch.addcmul(_ZERO.to(sums.device) if first is None else first.float(), sums, scale, value=unit)
    return (out if second is None else out.add_(second)).to(dtype)


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
