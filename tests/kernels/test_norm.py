"""Norms in the interpreter against float64."""

from __future__ import annotations

import pytest
import torch
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.kernels.triton import norm as kernels

EPS = 1e-5


def expected_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str) -> Tensor:
    x = x.double()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    out = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    if weight is not None:
        out = out * weight.double()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (5, 768), (3, 1001), (1030, 64), (2, 16384), (4, 1)])
def test_norm(rows: int, size: int, dtype: torch.dtype, kind: str) -> None:
    x = (torch.randn(rows, size) * 3 + 1).to(dtype)
    weight, bias = torch.randn(size).to(dtype), torch.randn(size).to(dtype) if kind == "layer" else None
    out = kernels.norm(x, weight, bias, EPS, kind)
    assert out.dtype == dtype
    assert relative_error(out, expected_norm(x, weight, bias, kind)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_norm_without_weights(kind: str) -> None:
    x = torch.randn(2, 3, 100)
    assert relative_error(kernels.norm(x, None, None, EPS, kind), expected_norm(x, None, None, kind)) < 1e-6


def test_norm_of_the_heads_of_a_fused_projection() -> None:
    fused = torch.full((300, 7 * 32), float("nan"), dtype=torch.bfloat16)
    heads = fused[:, 32:160].view(300, 4, 32)
    heads[:] = torch.randn(heads.shape).bfloat16()
    weight = torch.randn(32)
    out = kernels.norm(heads, weight, None, EPS, "rms")
    assert out.shape == heads.shape and out.is_contiguous()
    assert relative_error(out, expected_norm(heads, weight, None, "rms")) < 1e-2


def test_nothing_to_do() -> None:
    assert kernels.norm(torch.zeros(0, 8), None, None, EPS, "rms").shape == (0, 8)


def test_refused() -> None:
    with pytest.raises(ValueError, match="norm kind 'batch' is none of rms, layer"):
        kernels.norm(torch.zeros(1, 8), None, None, EPS, "batch")
    with pytest.raises(ValueError, match="at most 65536"):
        kernels.norm(torch.zeros(1, 70_000), None, None, EPS, "rms")
