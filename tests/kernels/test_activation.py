"""Activations in the interpreter against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import TOLERANCE, relative_error

from stoker.kernels.reference import activation as reference
from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.triton import activation as kernels


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activate(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 333) * 4).to(dtype)
    assert relative_error(kernels.activate(x, name), ACTIVATIONS[name](x.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [7, 1500])
def test_gated(name: str, dtype: torch.dtype, size: int) -> None:
    gate_up = (torch.randn(2, 2, 2 * size) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = kernels.gated(gate_up, name)
    assert out.shape == (2, 2, size)
    assert relative_error(out, ACTIVATIONS[name](gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_extremes_stay_finite(name: str) -> None:
    x = torch.tensor([-1e4, -80.0, -0.0, 0.0, 80.0, 1e4])
    assert torch.allclose(kernels.activate(x, name).double(), ACTIVATIONS[name](x.double()), rtol=1e-6, atol=1e-6)


def test_nothing_to_do() -> None:
    assert kernels.gated(torch.zeros(0, 8), "silu").shape == (0, 4)


def test_refused() -> None:
    with pytest.raises(ValueError, match="activation 'swish' is none of silu"):
        kernels.activate(torch.zeros(1), "swish")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_xielu(dtype: torch.dtype) -> None:
    """The definition in float64, near 0 included, where exp(x) - 1 loses digits."""
    x = torch.cat((torch.randn(2000) * 4, torch.randn(200) * 1e-2, torch.tensor([-80.0, 0.0, -1e-9]))).to(dtype)
    alpha_p, alpha_n, beta, eps = parameters = torch.tensor([0.8, 0.9, 0.5, -1e-6])
    wide = x.double()
    negative = alpha_n.double() * (torch.expm1(wide.clamp(max=eps.double())) - wide)
    expected = torch.where(wide > 0, alpha_p.double() * wide.square(), negative) + beta.double() * wide
    for module in (kernels, reference):
        assert relative_error(module.xielu(x, parameters), expected) < TOLERANCE[dtype]
    assert kernels.xielu(x[:0], parameters).shape == (0,)
