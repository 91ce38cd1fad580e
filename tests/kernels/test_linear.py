"""Small linears in the interpreter against float64: every fusion, ragged sizes, split K."""

from __future__ import annotations

import pytest
import torch
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.kernels.reference import linear as reference
from stoker.kernels.triton.gemm.dense import launch as kernels
from stoker.kernels.tuning.tiles import LinearTile
from stoker.kernels.types import Fusion

GEMV, DOT, SPLIT = LinearTile(4, 64), LinearTile(16, 64), LinearTile(16, 32, splits=4)


def fusion(m: int, n: int, k: int, dtype: torch.dtype, parts: str) -> Fusion:
    norm = "n" in parts
    return Fusion(
        norm_kind="rms" if norm else None,
        norm_weight=torch.randn(k).to(dtype) if norm else None,
        norm_eps=1e-5,
        gate="silu" if "g" in parts else None,
        residual=torch.randn(m, n).to(dtype) if "r" in parts else None,
    )


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, around: Fusion) -> Tensor:
    wide = Fusion(around.norm_kind, double(around.norm_weight), None, around.norm_eps, around.gate, double(around.residual))
    h = x.double()
    if wide.norm_kind:
        h = h / (h.square().mean(-1, keepdim=True) + wide.norm_eps).sqrt() * wide.norm_weight
    y = h @ weight.double().T + (0 if bias is None else bias.double())
    if wide.gate:
        gate, up = y.chunk(2, -1)
        y = gate * torch.sigmoid(gate) * up
    return y if wide.residual is None else y + wide.residual


@pytest.mark.parametrize("parts", ["", "b", "n", "g", "r", "ng", "nbgr"])
@pytest.mark.parametrize(("m", "tile"), [(1, GEMV), (2, DOT), (17, DOT), (3, SPLIT), (64, SPLIT)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_linear(m: int, tile: LinearTile, parts: str, dtype: torch.dtype) -> None:
    n, k = 37, 200
    x = torch.randn(m, k + 8).to(dtype)[:, :k]
    weight = (torch.randn(2 * n if "g" in parts else n, k) * k**-0.5).to(dtype)
    bias = torch.randn(weight.shape[0]).to(dtype) if "b" in parts else None
    around = fusion(m, n, k, dtype, parts)
    want = expected(x, weight, bias, around)
    assert relative_error(kernels.small_linear(x, weight, bias, around, tile), want) < TOLERANCE[dtype]
    assert relative_error(reference.linear(x, weight, bias, around), want) < TOLERANCE[dtype]
    assert not kernels._split_counters(x.device).any()


@pytest.mark.parametrize("parts", ["", "nb"])
@pytest.mark.parametrize(("m", "tile"), [(1, GEMV), (5, DOT), (17, SPLIT)])
def test_tokens_are_widened_to_the_dtype_of_the_weight(m: int, tile: LinearTile, parts: str) -> None:
    x, weight = torch.randn(m, 200).bfloat16(), torch.randn(37, 200)
    bias = torch.randn(37) if "b" in parts else None
    around = fusion(m, 37, 200, torch.float32, parts)
    found = kernels.small_linear(x, weight, bias, around, tile)
    assert torch.equal(found, kernels.small_linear(x.float(), weight, bias, around, tile))


@pytest.mark.parametrize("parts", ["", "b", "n", "g", "r", "nbgr"])
def test_library_linear(parts: str) -> None:
    n, k = 24, 48
    x, weight = torch.randn(65, k), torch.randn(2 * n if "g" in parts else n, k)
    bias = torch.randn(weight.shape[0]) if "b" in parts else None
    around = fusion(65, n, k, torch.float32, parts)
    assert relative_error(kernels.linear(x, weight, bias, around), expected(x, weight, bias, around)) < 1e-5


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 2048), (300, 16), (130, 576)])
@pytest.mark.parametrize("m", [1, 5])
def test_default_tiles_cover_any_shape(m: int, n: int, k: int) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k)
    assert relative_error(kernels.linear(x, weight), x.double() @ weight.double().T) < 1e-5


def test_nothing_to_do() -> None:
    assert kernels.linear(torch.zeros(0, 8), torch.zeros(6, 8)).shape == (0, 6)


def test_refused() -> None:
    with pytest.raises(ValueError, match="dense weight"):
        kernels.linear(torch.zeros(1, 8), torch.zeros(8, 6).t())
    with pytest.raises(ValueError, match="residual"):
        kernels.linear(torch.zeros(1, 8), torch.zeros(6, 8), fusion=Fusion(residual=torch.zeros(1, 5)))
    for rows in (1, 2, 16):
        with pytest.raises(ValueError, match=r"one dtype; they are \S+bfloat16 and \S+float32"):
            kernels.linear(torch.zeros(rows, 32, dtype=torch.bfloat16), torch.zeros(6, 32))
