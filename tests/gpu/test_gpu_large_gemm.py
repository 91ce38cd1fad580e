"""The GEMM for many rows on the device against float64, on random inputs. The sizes differ from run to run.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

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


def check(m: int, n: int, k: int, parts: str, dtype: torch.dtype, tile: Any) -> torch.Tensor:
    """The output of a product with a bias (b), a gate (g) and a residual (r), compared with float64."""
    from stoker.kernels.triton.gemm.large.launch import large_gemm

    x, x_scale, wide_x = operand(m, k, dtype)
    weight, weight_scale, wide_weight = operand(2 * n if "g" in parts else n, k, dtype)
    kind = torch.bfloat16 if dtype == FP8 else dtype
    bias = torch.randn(weight.shape[0], device="cuda", dtype=kind) if "b" in parts else None
    residual = torch.randn(m, n, device="cuda", dtype=kind) if "r" in parts else None
    gate = "silu" if "g" in parts else None
    arguments = {"x_scale": x_scale, "weight_scale": weight_scale, "bias": bias, "residual": residual, "gate": gate}
    torch.full((m, n), torch.nan, device="cuda", dtype=kind)  # freed, and then the memory of the output
    out = large_gemm(x, weight, tile, **arguments)
    fusion = Fusion(gate=gate, residual=None if residual is None else residual.double())
    expected = linear_reference.linear(wide_x, wide_weight, None if bias is None else bias.double(), fusion)
    assert relative_error(out, expected) < 1e-2, (m, n, k, tile)
    assert torch.equal(large_gemm(x, weight, tile, **arguments), out), (m, n, k, tile)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("parts", ["", "r", "bgr"])
def test_any_sizes(parts: str, dtype: torch.dtype) -> None:
    from stoker.kernels.triton.gemm.large.tiles import NARROW_TILE, SMALL_TILE, TALL_TILE, TILE

    for tile in (TILE, NARROW_TILE, TALL_TILE, SMALL_TILE):
        if tile == TALL_TILE and "g" in parts:
            continue
        for i in range(4):
            tile = tile._replace(max_slices=(1, 2, 8)[i % 3])
            check(random.choice([1, 127, 192, 300, 2049]), 8 * random.randrange(1, 200), 16 * random.randrange(9, 300), parts, dtype, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [129, 300, 768, 2048])
def test_int8_weights_and_rows_as_digits(m: int, dtype: torch.dtype) -> None:
    """The head of Llama-3.1-8B with a norm, and random sizes with a bias and a residual."""
    from stoker.kernels.triton.gemm.large.launch import supports_digits
    from stoker.kernels.triton.gemm.quantized.int8 import large_int8_linear

    for n, k, is_head in ((128256, 4096, True), (8 * random.randrange(1, 400), 16 * random.randrange(9, 300), False)):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        weight = PackedWeight(
            "int8",
            torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8),
            torch.rand(n, device="cuda") * k**-0.5 / 70 + 1e-6,
            bias=None if is_head else torch.randn(n, device="cuda", dtype=dtype),
        )
        fusion = Fusion(norm_kind="rms", norm_weight=torch.rand(k, device="cuda", dtype=dtype), norm_eps=1e-5)
        if not is_head:
            fusion = Fusion(residual=torch.randn(m, n, device="cuda", dtype=dtype))
        assert supports_digits(x, weight.values)
        out = large_int8_linear(x, weight, fusion)
        rows = torch.randperm(m, device="cuda")[:64]
        residual, norm_weight = fusion.residual, fusion.norm_weight
        wide = replace(
            fusion,
            residual=None if residual is None else residual[rows].double(),
            norm_weight=None if norm_weight is None else norm_weight.double(),
        )
        assert weight.scale is not None
        bias = None if weight.bias is None else weight.bias.double()
        expected = linear_reference.linear(x[rows].double(), weight.values.double() * weight.scale.double()[:, None], bias, wide)
        assert relative_error(out[rows], expected) < (4e-3 if dtype == torch.bfloat16 else 6e-4), (m, n, k)


def test_slices_leave_their_counters_at_zero() -> None:
    """Fifty launches, each of which finds the counters that the one before has left."""
    from stoker.kernels.triton.gemm.large.launch import finished_counters
    from stoker.kernels.triton.gemm.large.tiles import SPLIT_TILE

    for _ in range(50):
        check(256, 4096, 2048, "r", FP8, SPLIT_TILE)
    assert not finished_counters(torch.device("cuda", torch.cuda.current_device())).any()


def test_linears_that_use_it() -> None:
    from stoker.kernels.triton.gemm.large.launch import faster_tile
    from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

    m, n, k = 1024, 4096, 4096
    x, residual = (torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    added = Fusion(residual=residual)
    assert faster_tile(x, weight, added) is not None
    expected = linear_reference.linear(x.double(), weight.double(), None, Fusion(residual=residual.double()))
    assert relative_error(ops.linear(x, weight, None, added), expected) < 1e-2
    quantized = quantize_rows(weight, "fp8", k)
    packed = PackedWeight("fp8", quantized.values, quantized.scale, activations="token")
    assert faster_tile(quantized.values[:m], packed.values, Fusion(residual=residual[:, :n])) is not None
    assert relative_error(ops.packed_linear(x, packed, added), expected) < 0.06


@pytest.mark.parametrize("m", [129, 192, 256, 500])
@pytest.mark.parametrize(("n", "k", "gate"), [(4096, 14336, None), (4096, 4096, "silu")])
def test_rows_of_a_captured_step(m: int, n: int, k: int, gate: str | None) -> None:
    """A row has the same bits in each replay of a graph, in an eager launch, and whatever the other rows are."""
    from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

    x, residual = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    weight = quantize_rows(torch.randn(2 * n if gate else n, k, device="cuda", dtype=torch.bfloat16), "fp8", k)
    packed = PackedWeight("fp8", weight.values, weight.scale, activations="token")
    assert ops.gates_output(x, packed) or gate is None
    fusion = Fusion(gate=gate, residual=residual)
    eager = ops.packed_linear(x, packed, fusion)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.packed_linear(x, packed, fusion)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, eager)
    x[1:].normal_()
    residual[1:].normal_()
    graph.replay()
    assert torch.equal(out[0], eager[0]) and not torch.equal(out[1:], eager[1:])
