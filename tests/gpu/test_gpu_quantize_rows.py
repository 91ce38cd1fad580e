"""Rows quantized on the device against float64, after a gate or a norm. The widths are those of models, and one that ends inside a chunk.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from test_gpu_kernels import relative_error

from stoker.kernels.reference import activation as activation_reference
from stoker.kernels.reference import norm as norm_reference

WIDTHS = (4096, 5000, 7168, 14336, 28672)
LIMITS = {"fp8": 448, "int8": 127, "digits": 127 * 254}


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("kind", ["plain", "gate", "norm"])
@pytest.mark.parametrize("form", LIMITS)
def test_quantize_rows(form: str, kind: str, k: int) -> None:
    """70 rows, one of them with a NaN, and with a gate also 2,000 rows of float16.

    The error is that of values rounded from float64. With a gate, the product may be rounded to the other of two 16-bit values.
    """
    from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

    for rows, dtype in ((70, torch.bfloat16), (2000, torch.float16))[: 2 if kind == "gate" else 1]:
        x = torch.randn(rows, k * (2 if kind == "gate" else 1), dtype=dtype, device="cuda")
        x[5, k - 1] = float("nan")
        weight = torch.rand(k, device="cuda").to(dtype) + 0.5 if kind == "norm" else None
        gate = "silu" if kind == "gate" else None
        result = quantize_rows(x, form, k, norm_weight=weight, eps=1e-5, gate=gate)
        real = x.double()
        if gate:
            real = activation_reference.gated(real, gate).to(dtype).double()
        if weight is not None:
            real = norm_reference.norm(real, weight.double(), None, 1e-5, "rms")
        values = result.values.double()
        if form == "digits":
            values = 254 * values[:rows] + values[rows:]
        is_number = torch.arange(rows, device="cuda") != 5
        assert result.scale.isnan().nonzero().flatten().tolist() == [5]
        values, scale, real = values[is_number], result.scale[is_number, None], real[is_number]
        steps = real.abs().amax(1, keepdim=True) / LIMITS[form]
        assert relative_error(scale, steps) < (5e-3 if gate else 1e-5)
        units = real / steps
        nearest = units.float().to(torch.float8_e4m3fn).double() if form == "fp8" else units.round()
        assert relative_error(values * scale, real) < 1.02 * relative_error(nearest * steps, real) + (3e-3 if gate else 1e-6)
