"""The skinny GEMMs, and int4 in tiles, on the device: their matrix instructions do not run in the interpreter.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_fp8 as fp8_reference
from stoker.kernels.reference.linear import around
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.types import Fusion

TILES = [None, (2, 1, 8, 4), (2, 3, 4, 2), (4, 2, 8, 1)]  # fields of a SkinnyTile; None: the tuned one
SHAPES = [(40, 576), (96, 4096), (1000, 1536)]  # rows that end inside a tile, features that end inside an iteration of all warps


def problem(m: int, n: int, k: int, parts: str) -> tuple[Tensor, Tensor | None, Fusion, int]:
    rows = 2 * n if "g" in parts else n
    x = torch.randn(m, k).bfloat16()
    x[:, 3] *= 20
    fusion = Fusion(
        "rms" if "n" in parts else None, torch.randn(k).bfloat16() if "n" in parts else None, None, 1e-5, "silu" if "g" in parts else None,
        torch.randn(m, n).bfloat16() if "r" in parts else None,
    )  # fmt: skip
    return x, torch.randn(rows).bfloat16() if "b" in parts else None, fusion, rows


def expected(x: Tensor, real: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor:
    wide = Fusion(*(part.double() if isinstance(part, Tensor) else part for part in (getattr(fusion, name) for name in Fusion.__slots__)))
    return around(x.double(), wide, lambda h: h @ real.double().T + (0 if bias is None else bias.double()))


def to_cuda(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


def weight_on_device(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(*(to_cuda(getattr(weight, name)) for name in PackedWeight.__slots__))


def check(weight: PackedWeight, x: Tensor, fusion: Fusion, expected_y: Tensor, max_error: float) -> None:
    """Compare the results with all TILES. Each runs twice, so that the scratch memory of the second launch holds other sums."""
    from stoker.kernels.triton.gemm.skinny.launch import skinny_linear
    from stoker.kernels.tuning.tiles import SkinnyTile

    on_device = weight_on_device(weight)
    fusion_on_device = Fusion(*(to_cuda(getattr(fusion, name)) for name in Fusion.__slots__))
    for tile in TILES:
        for rows in (x.flip(0), x):
            torch.full((1 << 22,), float("nan"), device="cuda")  # the next allocations hold these values
            y = skinny_linear(rows.cuda(), on_device, fusion_on_device, tile and SkinnyTile(*tile))
        assert relative_error(y.cpu(), expected_y) < max_error, tile


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("m", "parts"), [(1, "nbgr"), (3, "br"), (8, "ng")])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_8_bit_weights(form: str, m: int, parts: str, shape: tuple[int, int]) -> None:
    (n, k) = shape
    x, bias, fusion, rows = problem(m, n, k, parts)
    scale = (torch.rand(rows) + 0.5) / (60 * k**0.5)
    if form == "int8":
        weight = PackedWeight("int8", torch.randint(-127, 128, (rows, k), dtype=torch.int8), scale, bias=bias)
        expected_y = expected(x, weight.values.double() * scale.double()[:, None], bias, fusion)
    else:
        values = (torch.randn(rows, k) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight = PackedWeight("fp8", values, scale, bias=bias, activations="token")
        expected_y = fp8_reference.packed_linear(x.float(), weight, fusion)
    check(weight, x, fusion, expected_y, 1e-2)


def int4(rows: int, k: int, zero: str, group: int, bias: Tensor | None) -> PackedWeight:
    groups = -(-k // group)
    scale = ((torch.rand(rows, groups) + 0.5) / (5 * k**0.5)).half()
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8) if zero == "int" else None
    if zero == "float":
        zeros = (-torch.rand(rows, groups) / k**0.5).half()
    return PackedWeight("int4", torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8), scale, zeros, group, bias=bias)


def fp4(rows: int, k: int, group: int) -> PackedWeight:
    """As NVFP4 has it: e4m3 scales of groups and a factor of each row."""
    scale = (torch.rand(rows, -(-k // group)) + 0.1).to(torch.float8_e4m3fn).bfloat16()
    values, row_scale = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8), (torch.rand(rows) + 0.5) / k**0.5 / 4
    return PackedWeight("int4", values, scale, None, group, is_fp4=True, row_scale=row_scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("m", "parts"), [(1, "nbgr"), (3, "br"), (8, "ng")])
@pytest.mark.parametrize(
    ("zero", "group"), [("none", 64), ("int", 128), ("float", 64), ("int", 64), ("int", 32), ("float", 32), ("e2m1", 32)]
)
def test_int4(zero: str, group: int, m: int, parts: str, shape: tuple[int, int]) -> None:
    from stoker.kernels.triton.gemm.quantized import int4 as quant_int4

    n, k = shape[0], shape[1] // 128 * 128  # whole chunks of groups of 32
    x, bias, fusion, rows = problem(m, n, k, parts)
    weight = int4(rows, k, zero, group, bias)
    expected_y = expected(x, dequantize_int4(weight, torch.float64), bias, fusion)
    check(quant_int4.prepare_weight(weight), x, fusion, expected_y, 1e-2)


def check_launcher(weight: PackedWeight, m: int, parts: str, shape: tuple[int, int]) -> None:
    """Compare the results of the kernel that the launcher chooses with the product of the dequantized weight."""
    from stoker.kernels.triton.gemm.quantized import int4 as quant_int4

    x, bias, fusion, _ = problem(m, *shape, parts)
    weight = replace(weight, bias=bias)
    expected_y = expected(x, dequantize_int4(weight, torch.float64), bias, fusion)
    packed = quant_int4.prepare_weight(weight_on_device(weight))
    fusion_on_device = Fusion(*(to_cuda(getattr(fusion, name)) for name in Fusion.__slots__))
    assert relative_error(quant_int4.packed_linear(x.cuda(), packed, fusion_on_device).cpu(), expected_y) < 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("m", "parts"), [(12, "nbgr"), (32, "br"), (64, "ng")])
@pytest.mark.parametrize(("zero", "group"), [("none", 128), ("int", 128), ("int", 64), ("none", 32), ("float", 32), ("float", 16)])
def test_int4_of_12_to_64_rows(zero: str, group: int, m: int, parts: str, shape: tuple[int, int]) -> None:
    check_launcher(int4(shape[0] * (2 if "g" in parts else 1), shape[1], zero, group, None), m, parts, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("m", "parts"), [(1, "nbgr"), (8, "br"), (64, "ng"), (200, "ng")])
@pytest.mark.parametrize("group", [16, 32])
def test_fp4(group: int, m: int, parts: str, shape: tuple[int, int]) -> None:
    check_launcher(fp4(shape[0] * (2 if "g" in parts else 1), shape[1], group), m, parts, shape)
