"""The GEMM for many rows on the device against float64, on random inputs. The sizes differ from run to run.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.types import Fusion

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def hopper() -> None:
    from stoker.kernels.triton.device import supports

    if not supports(torch.empty(1, device="cuda"), "large_gemm"):
        pytest.skip("the kernel needs sm_90")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert not out.isnan().any()
    return float((out.double() - expected).norm() / expected.norm())


def operand(rows: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(values, scale of each row or None, real values in float64)."""
    from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

    x = torch.randn(rows, k, device="cuda", dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16)
    if dtype != FP8:
        return x, None, x.double()
    quantized = quantize_rows(x, "fp8", k)
    return quantized.values, quantized.scale, quantized.values.double() * quantized.scale[:, None].double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("parts", ["", "r", "bgr"])
def test_any_sizes(parts: str, dtype: torch.dtype) -> None:
    from stoker.kernels.triton.gemm.large.launch import large_gemm

    for _ in range(4):
        m, n, k = random.choice([1, 127, 300, 2049]), 8 * random.randrange(1, 200), 16 * random.randrange(1, 300)
        x, x_scale, wide_x = operand(m, k, dtype)
        weight, weight_scale, wide_weight = operand(2 * n if "g" in parts else n, k, dtype)
        kind = torch.bfloat16 if dtype == FP8 else dtype
        bias = torch.randn(weight.shape[0], device="cuda", dtype=kind) if "b" in parts else None
        residual = torch.randn(m, n, device="cuda", dtype=kind) if "r" in parts else None
        gate = "silu" if "g" in parts else None
        torch.full((m, n), torch.nan, device="cuda", dtype=kind)  # freed, and then the memory of the output
        out = large_gemm(x, weight, x_scale=x_scale, weight_scale=weight_scale, bias=bias, residual=residual, gate=gate)
        fusion = Fusion(gate=gate, residual=None if residual is None else residual.double())
        expected = linear_reference.linear(wide_x, wide_weight, None if bias is None else bias.double(), fusion)
        assert relative_error(out, expected) < 1e-2, (m, n, k)


def test_linears_that_use_it() -> None:
    from stoker.kernels.triton.gemm.large.launch import is_faster
    from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

    m, n, k = 1024, 4096, 4096
    x, residual = (torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    added = Fusion(residual=residual)
    assert is_faster(x, weight, added)
    expected = linear_reference.linear(x.double(), weight.double(), None, Fusion(residual=residual.double()))
    assert relative_error(ops.linear(x, weight, None, added), expected) < 1e-2
    quantized = quantize_rows(weight, "fp8", k)
    packed = PackedWeight("fp8", quantized.values, quantized.scale, activations="token")
    assert is_faster(quantized.values[:m], packed.values, Fusion(residual=residual[:, :n]))
    assert relative_error(ops.packed_linear(x, packed, added), expected) < 0.06
