"""Linears with e4m3 weights, and of many rows with float32 weights, in the C kernels, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_cases import TOLERANCE, expected, fused, needs_compiler
from oracle import relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native import linear, quant_fp8
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import quant_fp8 as fp8_reference
from stoker.kernels.types import PLAIN, Fusion

needs_bfloat16 = pytest.mark.skipif("not quant_fp8.has_bfloat16_products()", reason="no AVX512-BF16")
ALL_VALUES = torch.tensor([value for value in range(256) if value & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
pytestmark = needs_compiler


def fp8_weight(rows: int, columns: int, activations: str = "token") -> PackedWeight:
    values = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    static = torch.tensor([0.03]) if activations == "static" else None
    return PackedWeight("fp8", values, torch.rand(rows) / (100 * columns**0.5) + 1e-4, activations=activations, input_scale=static)


def fp8_expected(x: Tensor, weight: PackedWeight, fusion: Fusion) -> Tensor:
    """The linear in float64, with the activations that the reference rounds in float32."""
    assert weight.scale is not None
    rounded = fp8_reference._round_activations(linear_reference.before(x.float(), fusion), weight.activations, weight.input_scale)
    wide = weight.values.double() * weight.scale[:, None].double()
    return expected(rounded, wide, weight.bias, Fusion(gate=fusion.gate, residual=fusion.residual))


@pytest.fixture(params=["few rows", pytest.param("many rows", marks=needs_bfloat16)])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Numbers of rows for linear.c, or for gemm.c. The test fails when the reference runs."""
    monkeypatch.setattr(fp8_reference, "packed_linear", lambda *_: pytest.fail("the reference ran"))
    return (1, 2, 3, 4) if request.param == "few rows" else (5, 12, 13, 41)


@pytest.mark.parametrize("parts", ["", "n", "lb", "ibr", "nbgr"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fp8_fusions(rows: tuple[int, ...], parts: str, dtype: torch.dtype) -> None:
    for out, size in ((34, 33), (70, 96), (2, 577)):
        weight = replace(fp8_weight(out, size), bias=torch.randn(out).to(dtype) if "b" in parts else None)
        for count in rows:
            x = torch.randn(count, (2 * size if "i" in parts else size) + 8).to(dtype)[:, :-8]
            fusion = fused(count, out // 2 if "g" in parts else out, size, dtype, parts)
            y = quant_fp8.packed_linear(x, weight, fusion)
            assert y.dtype == dtype and relative_error(y, fp8_expected(x, weight, fusion)) < TOLERANCE[dtype]


@pytest.mark.parametrize("out", [1, 31, 65])
@pytest.mark.parametrize("size", [1, 2, 15, 130])
@pytest.mark.parametrize("activations", ["token", "static"])
def test_fp8_sizes(rows: tuple[int, ...], size: int, out: int, activations: str) -> None:
    weight = fp8_weight(out, size, activations)
    for count in rows:
        x = torch.randn(count, size) * 5
        assert relative_error(quant_fp8.packed_linear(x, weight), fp8_expected(x, weight, PLAIN)) < TOLERANCE[torch.float32]


def test_every_e4m3_value_is_exact(rows: tuple[int, ...]) -> None:
    """As a weight, and as an activation, which 448 in the same row gives a scale of 1."""
    ones = torch.ones(len(ALL_VALUES))
    for count in rows:
        x = torch.zeros(count, 40)
        x[:, 7] = 1
        weight = PackedWeight("fp8", torch.zeros(len(ALL_VALUES), 40).to(torch.float8_e4m3fn), ones, activations="token")
        weight.values[:, 7] = ALL_VALUES
        assert torch.equal(quant_fp8.packed_linear(448 * x, weight), 448 * ALL_VALUES.float().expand(count, -1))
        identity = PackedWeight("fp8", torch.eye(len(ALL_VALUES)).to(torch.float8_e4m3fn), ones, activations="token")
        assert torch.equal(quant_fp8.packed_linear(ALL_VALUES.float().expand(count, -1), identity), ALL_VALUES.float().expand(count, -1))


def test_activations_are_rounded_like_the_reference(rows: tuple[int, ...]) -> None:
    """Ties, subnormal values, and values outside the range of a static scale."""
    x = torch.cat((torch.randn(500) * 10 ** torch.linspace(-6, 4, 500), torch.arange(-500, 500) / 1024, ALL_VALUES.float() * 1.0625))
    weight = PackedWeight("fp8", torch.eye(len(x)).to(torch.float8_e4m3fn), torch.ones(len(x)))
    for count in rows:
        for activations, scale in (("token", None), ("static", torch.tensor([1.0])), ("static", torch.tensor([0.37]))):
            rounded = fp8_reference._round_activations(x.expand(count, -1), activations, scale)
            found = quant_fp8.packed_linear(x.expand(count, -1), replace(weight, activations=activations, input_scale=scale))
            assert torch.equal(found, rounded)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_fp8_rows_are_independent(rows: tuple[int, ...], value: float) -> None:
    weight, norm = fp8_weight(50, 130), Fusion(norm_kind="rms", norm_eps=1e-5)
    for count in rows[1:]:
        x = torch.randn(count, 130)
        alone = quant_fp8.packed_linear(x, weight, norm)
        x[1, 5] = value
        found = quant_fp8.packed_linear(x, weight, norm)
        others = [row for row in range(count) if row != 1]
        assert not found[1].isfinite().any() and torch.equal(found[others], alone[others])
    weight.values[3, 4] = float("nan")
    assert quant_fp8.packed_linear(x[:1].expand(rows[0], -1), weight).isnan().sum() == rows[0]


def test_a_weight_that_is_not_supported_is_widened() -> None:
    weight = fp8_weight(4, 8)
    assert (quant_fp8.prepare_weight(weight) is weight) == quant_fp8.has_bfloat16_products()
    x = torch.randn(20, 8)
    for other in (replace(weight, activations="none"), replace(weight, scale=weight.scale.double())):  # type: ignore[union-attr]
        prepared = quant_fp8.prepare_weight(other)
        assert prepared.values.dtype == torch.float32
        assert torch.equal(quant_fp8.packed_linear(x, prepared), fp8_reference.packed_linear(x, other))


def float32_product(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """The dense linear in gemm.c. Skips the test on processors without it."""
    native = linear.dense_weight(weight)
    assert native is not None
    y = linear.product(x, native, bias, fusion)
    return y if y is not None else pytest.skip("no AVX2")


@pytest.mark.parametrize("parts", ["", "lb", "ibr", "nbgr"])
@pytest.mark.parametrize("count", [9, 24, 61])
def test_float32_weights(parts: str, count: int) -> None:
    for out, size in ((34, 33), (70, 96), (2, 577)):
        weight, bias = torch.randn(out, size) / size**0.5, torch.randn(out) if "b" in parts else None
        x = torch.randn(count, 2 * size if "i" in parts else size)
        fusion = fused(count, out // 2 if "g" in parts else out, size, torch.float32, parts)
        y = float32_product(x, weight, bias, fusion)
        assert relative_error(y, expected(x, weight.double(), bias, fusion)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("out", [20, 700])
def test_the_number_of_threads_does_not_change_results(out: int) -> None:
    """Few columns are divided by rows, too."""
    threads, x, weight, found = torch.get_num_threads(), torch.randn(150, 64), torch.randn(out, 64), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(float32_product(x, weight, None, PLAIN))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(y, found[0]) for y in found)


def test_many_rows_of_a_head_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(linear.MIN_GEMM_ROWS, 8), torch.randn(200, 8)
    float32_product(x, weight, None, PLAIN)
    monkeypatch.setattr(linear_reference, "linear", lambda *_: pytest.fail("the reference ran"))
    assert relative_error(linear.linear(x, weight), x.double() @ weight.double().t()) < TOLERANCE[torch.float32]
