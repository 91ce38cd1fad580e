"""Norms by the C kernel, next to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.kernels.native import library, norm
from stoker.kernels.reference import norm as reference

pytestmark = pytest.mark.skipif(isinstance(library.kernels(), str), reason="no C kernels")


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str) -> None:
    wide = [None if t is None else t.double() for t in (weight, bias)]
    expected, found = reference.norm(x.double(), *wide, 1e-5, kind), norm._norm(x, weight, bias, 1e-5, kind)
    assert found is not None and found.dtype == x.dtype and found.shape == x.shape and found.is_contiguous()
    limit = 1e-5 if x.dtype == torch.float32 else 2**-7
    assert ((found.double() - expected).abs() <= limit * expected.abs().clamp(min=1.0)).all()
    rows = found.flatten(0, -2)
    alone = norm._norm(x[-1:], weight, bias, 1e-5, kind)
    assert alone is not None and torch.equal(alone.flatten(0, -2)[-1], rows[-1])  # the same bits in every batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(1, 576), (3, 100), (5, 4, 64), (2, 3, 33), (700, 129)])
def test_norms(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(shape).to(dtype) + 1, torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1])
    check(x, weight, bias if kind == "layer" else None, kind)
    check(x, None, None, kind)
    heads = torch.cat([x, x], dim=-1)[..., : shape[-1]]
    check(heads, weight.float(), None, kind)


def test_views_of_heads_and_several_threads() -> None:
    threads, qkv = torch.get_num_threads(), torch.randn(900, 8 * 64)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for heads in qkv.view(900, 8, 64).split([5, 3], dim=1):
                check(heads, torch.randn(64), None, "rms")
    finally:
        torch.set_num_threads(threads)


def test_unsupported_arguments_run_the_reference() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    for other in (x.double(), x.half(), x.t().contiguous().t(), x[0], torch.randn(2, 2, 2, 32), torch.randn(2, 20_000)):
        factors = weight if other.shape[-1] == 32 else None
        assert torch.equal(norm.norm(other, factors, None, 1e-6, "rms"), reference.norm(other, factors, None, 1e-6, "rms"))
        assert norm._norm(other, factors, None, 1e-6, "rms") is None
    assert norm.norm(x[:0], weight, None, 1e-6, "rms").shape == (0, 32)
    with pytest.raises(RuntimeError):
        norm.norm(x, weight[:31], None, 1e-6, "rms")
