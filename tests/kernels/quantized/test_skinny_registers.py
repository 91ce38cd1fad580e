"""The register branch of the skinny GEMM kernels against float64, in the interpreter with emulated matrix instructions.

It checks which lane and register holds which weight, token and sum.
"""

from __future__ import annotations

import matrix_instructions
import pytest
import torch
from oracle import relative_error
from test_quant_linears import expected, fp8_weight, int4_weight, int8_weight, problem

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_fp8 as fp8_reference
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
from stoker.kernels.triton.gemm.quantized import launch as quant_linear
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.gemm.skinny_int4.launch import skinny_int4_linear
from stoker.kernels.tuning.tiles import SkinnyInt4Tile, SkinnyTile

pytestmark = pytest.mark.slow

CASES = [(1, "nbgr", SkinnyTile(2, 1, 4, 1)), (3, "br", SkinnyTile(2, 3, 1, 2)), (8, "ng", SkinnyTile(2, 1, 2, 2))]


@pytest.fixture(autouse=True)
def emulated_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_instructions.install(monkeypatch)


@pytest.mark.parametrize(("m", "parts", "tile"), CASES)
@pytest.mark.parametrize(("group", "zero"), [(32, "none"), (32, "int"), (32, "float"), (64, "int"), (128, "float"), (128, "none")])
def test_int4_digits(group: int, zero: str, m: int, parts: str, tile: SkinnyTile) -> None:
    x, bias, around, rows = problem(m, 40, 640, torch.bfloat16, parts)
    weight = int4_weight(rows, 640, group, zero, bias)
    packed = quant_int4.prepare_weight(weight)
    assert supports_skinny(x, packed) == (m <= 4 or group >= 64)
    expected_y = expected(x, dequantize_int4(weight, torch.float64), bias, around)
    assert relative_error(skinny_linear(x, packed, around, tile), expected_y) < 1e-2
    assert not quant_linear.split_counters(x.device).any()


@pytest.mark.parametrize(("m", "parts", "tile"), CASES)
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_8_bit_weights(form: str, m: int, parts: str, tile: SkinnyTile) -> None:
    x, bias, around, rows = problem(m, 40, 576, torch.bfloat16, parts)
    if form == "fp8":
        packed = PackedWeight("fp8", *fp8_weight(rows, 576), bias=bias, activations="token")
        expected_y = fp8_reference.packed_linear(x.float(), packed, around)
    else:
        weight, scale = int8_weight(rows, 576)
        expected_y = expected(x, weight.double() * scale.double()[:, None], bias, around)
        packed = PackedWeight("int8", weight, scale, bias=bias)
    assert relative_error(skinny_linear(x, packed, around, tile), expected_y) < 1e-2


INT4_CASES = [(5, "nbgr", SkinnyInt4Tile(2, 1, 2, 1)), (19, "br", SkinnyInt4Tile(1, 3, 1, 2)), (12, "ng", SkinnyInt4Tile(2, 2, 1, 1))]


@pytest.mark.parametrize(("m", "parts", "tile"), INT4_CASES)
@pytest.mark.parametrize(
    ("group", "zero"), [(16, "int"), (32, "float"), (32, "none"), (64, "int"), (64, "none"), (16, "e2m1"), (64, "e2m1")]
)
def test_int4_dequantized(group: int, zero: str, m: int, parts: str, tile: SkinnyInt4Tile) -> None:
    x, bias, around, rows = problem(m, 40, 640, torch.float16 if group == 64 else torch.bfloat16, parts)
    weight = int4_weight(rows, 640, group, zero, bias)
    packed = quant_int4.prepare_weight(weight)
    expected_y = expected(x, dequantize_int4(weight, torch.float64), bias, around)
    assert relative_error(skinny_int4_linear(x, packed, around, tile), expected_y) < 1e-2
    assert not quant_linear.split_counters(x.device).any()
