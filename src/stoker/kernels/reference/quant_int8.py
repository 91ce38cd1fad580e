"""Linears with int8 weights in plain PyTorch: weight-only, or with int8 activations (W8A8).

Integer products use PyTorch's int8 kernel (oneDNN) on the CPU, which is exact on processors with VNNI.

A weight-only product also uses integers: each activation is written as two int8 digits, x ≈ (coarse × 254 + fine) × unit, with
unit = largest magnitude of the row ÷ (127 × 254). That is 15 bits and a sign, so the result is close to that of float32.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.quantized import GroupedInt8Weight
from stoker.kernels.reference.linear import after, around, before
from stoker.kernels.types import PLAIN, Fusion

_COARSE = 254.0  # one unit of the coarse digit in units of the fine digit; both digits stay within ± 127
_UNIT = 1 / (127.0 * _COARSE)  # one unit of the fine digit, relative to the row's largest magnitude
_ZERO = torch.tensor(0.0)
_DIGITS = torch.tensor([[[127.0]], [[127.0 * _COARSE]]])  # the row's largest magnitude in units of each digit


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.int8_linear`."""
    rows = before(x, fusion)
    if fusion.gate is None:
        return _weight_only(rows, weight, scale, bias, fusion.residual)
    return after(_weight_only(rows, weight, scale, bias, None), fusion)


def takes_groups(weight: GroupedInt8Weight) -> bool:
    """See `ops.takes_int8_groups`: products with a weight that was widened at load are faster."""
    return False


def grouped_int8_linear(x: Tensor, weight: GroupedInt8Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.grouped_int8_linear`."""
    wide = widen_groups(weight.codes, weight.scale, weight.offset, weight.group_size).to(x.dtype)
    return around(x, fusion, lambda rows: F.linear(rows, wide, bias))


def widen_groups(codes: Tensor, scale: Tensor, offset: Tensor | None, group_size: int) -> Tensor:
    """float32 [..., out, in] from int8 values [..., out, in], scales and offsets [..., out, groups]."""
    size = codes.shape[-1]
    real = F.pad(codes.float(), (0, -size % group_size)).unflatten(-1, (-1, group_size)).mul_(scale.float()[..., None])
    if offset is not None:
        real.add_(offset.float()[..., None])
    return real.flatten(-2)[..., :size]


def int8_embedding(token_ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ops.int8_embedding`."""
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
    """See `ops.w8a8_linear`."""

    def product(rows: Tensor) -> Tensor:
        wide = rows.float()
        step = input_scale if input_scale is not None else wide.abs().amax(dim=-1, keepdim=True) / 127
        step = step.clamp(min=1e-12)
        codes = (wide / step).round_().clamp_(-127, 127).to(torch.int8)
        return _finish(_integer_product(codes, weight).mul_(step), 1.0, scale, bias, None, rows.dtype)

    return around(x, fusion, product)


def _weight_only(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x [M, K] × (weight × scale)ᵀ + bias + residual, with unrounded activations."""
    if not (x.device.type == "cpu" and exact_integers()):
        # For processors without VNNI, and as the oracle on other devices: the weight is widened in every call, which is slow.
        return _finish(F.linear(x.float(), weight.float()), 1.0, scale, bias, residual, x.dtype)
    # A row's digits depend on that row alone. Those of a row of zeros are undefined (0 ÷ 0) and are multiplied by zero in the end.
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    digits = wide * (_DIGITS / largest)
    coarse, fine = digits.unbind(0)
    fine.sub_(coarse.round_(), alpha=_COARSE).round_()
    # One product for both digits, so that the weight is read once: [3072, 576] from memory takes 282 µs, digit after digit 317.
    coarse, fine = torch._int_mm(digits.to(torch.int8).flatten(0, 1), weight.t()).chunk(2)
    return _finish(fine.float().add_(coarse, alpha=_COARSE).mul_(largest), _UNIT, scale, bias, residual, x.dtype)


def _finish(sums: Tensor, unit: float, scale: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums × unit × scale + bias + residual, in as few PyTorch operations as possible."""
    first, second = (bias, residual) if residual is None else (residual, bias)
    out = torch.addcmul(_ZERO.to(sums.device) if first is None else first.float(), sums, scale, value=unit)
    return (out if second is None else out.add_(second)).to(dtype)


def _integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [M, N]: the exact product of int8 x [M, K] and weight [N, K] transposed."""
    if x.device.type == "cpu" and exact_integers():
        return torch._int_mm(x, weight.t()).float()
    return F.linear(x.double(), weight.double()).float()


@cache
def exact_integers() -> bool:
    """Whether PyTorch's int8 product is exact on this processor: without VNNI, sums of two products saturate at 16 bits."""
    x, weight = torch.full((2, 64), 127, dtype=torch.int8), torch.full((32, 64), -127, dtype=torch.int8)
    return bool((torch._int_mm(x, weight.t()) == -64 * 127 * 127).all())
