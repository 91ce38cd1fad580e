"""Linears with int8 weights in plain PyTorch: weight-only, or with int8 activations (W8A8).

Integer products use PyTorch's int8 kernel (oneDNN) on CPUs with VNNI, where it is exact, and elsewhere float32, which is exact, too.

There, a weight-only product also uses integers: each activation is written as two int8 digits, x ≈ (coarse × 254 + fine) × unit, with
unit = largest magnitude of the row ÷ (127 × 254). That is 15 bits and a sign, so the result is close to that of float32.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.linear import after, around, before
from stoker.kernels.types import PLAIN, Fusion

_COARSE = 254.0  # one unit of the coarse digit in units of the fine digit; both digits stay within ± 127
_UNIT = 1 / (127.0 * _COARSE)  # one unit of the fine digit, relative to the row's largest magnitude
_ZERO = torch.tensor(0.0)
_EXACT_PRODUCTS = 1024  # of int8: their sum is below 2 to the 24, so that every sum is exact in float32
_DIGITS = torch.tensor([[[127.0]], [[127.0 * _COARSE]]])  # the row's largest magnitude in units of each digit


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """The weight itself: it is read as it is stored (`ops.prepare_weight`)."""
    return weight


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an int8 weight (`ops.packed_linear`)."""
    if weight.group_size:
        wide = widen_groups(weight).to(x.dtype)
        return around(x, fusion, lambda rows: F.linear(rows, wide, weight.bias))
    if weight.activations != "none":
        return around(x, fusion, lambda rows: _rounded_product(rows, weight))
    assert weight.scale is not None
    rows = before(x, fusion)
    if fusion.gate is None:
        return _weight_only(rows, weight.values, weight.scale, weight.bias, fusion.residual)
    return after(_weight_only(rows, weight.values, weight.scale, weight.bias, None), fusion)


def supports_groups(weight: PackedWeight) -> bool:
    """Always False: products with a weight that was widened at load are faster (`ops.supports_int8_groups`)."""
    return False


def widen_groups(weight: PackedWeight) -> Tensor:
    """The dequantized weight, float32 [(experts,) N, K]. Its scales and offsets cover groups."""
    assert weight.scale is not None
    size, group_size = weight.in_features, weight.group_size
    real = F.pad(weight.values.float(), (0, -size % group_size)).unflatten(-1, (-1, group_size)).mul_(weight.scale.float()[..., None])
    if weight.zero is not None:
        real.add_(weight.zero.float()[..., None])
    return real.flatten(-2)[..., :size]


def packed_embedding(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of a quantized embedding table in `dtype` (`ops.packed_embedding`)."""
    ids = token_ids.long()
    assert weight.scale is not None
    rows = replace(weight, values=weight.values[ids], scale=weight.scale[ids], zero=None if weight.zero is None else weight.zero[ids])
    if weight.group_size:
        return widen_groups(rows).to(dtype)
    assert rows.scale is not None
    return (rows.values.float() * rows.scale[:, None]).to(dtype)


def _rounded_product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x × weightᵀ + bias with activations rounded to int8. Their scale is `input_scale`, or each row's largest magnitude ÷ 127."""
    assert weight.scale is not None
    wide = x.float()
    step = weight.input_scale if weight.input_scale is not None else wide.abs().amax(dim=-1, keepdim=True) / 127
    step = step.clamp(min=1e-12)
    quantized = (wide / step).round_().clamp_(-127, 127).to(torch.int8)
    return _finish(_integer_product(quantized, weight.values).mul_(step), 1.0, weight.scale, weight.bias, None, x.dtype)


def _weight_only(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x [M, K] × (weight × scale)ᵀ + bias + residual, where x is not rounded to int8.

    Exact integer products of two digits per activation are used where the processor has them.
    """
    if not (x.device.type == "cpu" and has_integer_products()):
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
    """float32 [M, N]: the exact product of int8 x [M, K] and weight [N, K] transposed, rounded once."""
    if x.device.type == "cpu" and has_integer_products():
        return torch._int_mm(x, weight.t()).float()
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    for left, right in zip(x.split(_EXACT_PRODUCTS, dim=1), weight.split(_EXACT_PRODUCTS, dim=1), strict=True):
        sums += F.linear(left.float(), right.float())
    return sums.float()


@cache
def has_integer_products() -> bool:
    """Whether PyTorch's int8 product is exact on this processor, and faster than that of float32.

    Without VNNI, the sum of two products saturates at 16 bits in some versions, and others have a plain loop, in which 8 rows × [3072, 576]
    need 15 ms and not 0.5 ms.
    """
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_vnni_supported():
        return False
    x, weight = torch.full((2, 64), 127, dtype=torch.int8), torch.full((32, 64), -127, dtype=torch.int8)
    return bool((torch._int_mm(x, weight.t()) == -64 * 127 * 127).all())
