"""Linears in the formats of the C kernels with random weights, and their results in float64."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native import build, linear, quant_int4, quant_int8
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import quant_int4 as int4_reference
from stoker.kernels.types import Fusion

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3}  # bfloat16: one rounding of the result
DIGITS_TOLERANCE = 8e-5  # of activations that are rounded to 16 bits (digits.h)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler is installed")
kernel_only = pytest.mark.usefixtures("_no_reference")


class Rounded(tuple):  # type: ignore[type-arg]
    """A linear and its weight, in groups of 32 features or a multiple: the kernel may round x to 16 bits."""


def dense(rows: int, columns: int, dtype: torch.dtype) -> tuple[Callable, Tensor]:
    weight = (torch.randn(rows, columns) / columns**0.5).to(dtype)
    return lambda x, bias, fusion: linear.linear(x, weight, bias, fusion), weight.double()


def int8(rows: int, columns: int) -> tuple[Callable, Tensor]:
    weight, scale = torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows) / (70 * columns**0.5) + 1e-4
    packed = PackedWeight("int8", weight, scale)
    return lambda x, bias, fusion: quant_int8.packed_linear(x, replace(packed, bias=bias), fusion), weight.double() * scale[
        :, None
    ].double()


def grouped_weight(rows: int, columns: int, group: int, shifted: bool, dtype: torch.dtype = torch.float16) -> PackedWeight:
    scale = ((torch.rand(rows, -(-columns // group)) + 0.1) / (70 * columns**0.5)).to(dtype)
    offset = (torch.randn(scale.shape) * scale.float() * 20).to(dtype) if shifted else None
    return PackedWeight("int8", torch.randint(-128, 128, (rows, columns), dtype=torch.int8), scale, offset, group)


def grouped(rows: int, columns: int, group: int, shifted: bool, dtype: torch.dtype = torch.float16) -> tuple[Callable, Tensor]:
    weight = grouped_weight(rows, columns, group, shifted, dtype)
    scale, offset = (None if t is None else t.double().repeat_interleave(group, 1)[:, :columns] for t in (weight.scale, weight.zero))
    assert scale is not None
    real = weight.values.double() * scale + (0 if offset is None else offset)
    prepared = quant_int8.prepare_weight(weight)
    case = lambda x, bias, fusion: quant_int8.packed_linear(x, replace(prepared, bias=bias), fusion), real
    return case if group % 32 else Rounded(case)


def int4_weight(rows: int, columns: int, group: int, zero: str, dtype: torch.dtype = torch.float16) -> PackedWeight:
    groups = -(-columns // group)
    scale = ((torch.rand(rows, groups) + 0.1) / (4 * columns**0.5)).to(dtype)
    values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8) if zero == "int" else None
    if zero == "float":
        zeros = (torch.randn(rows, groups) * scale.float()).to(dtype)
    return PackedWeight("int4", values, scale, zeros, group)


def int4(rows: int, columns: int, group: int, zero: str, dtype: torch.dtype = torch.float16) -> tuple[Callable, Tensor]:
    weight = int4_weight(rows, columns, group, zero, dtype)
    real, prepared = int4_reference.dequantize_int4(weight, torch.float64), quant_int4.prepare_weight(weight)
    return Rounded((lambda x, bias, fusion: quant_int4.packed_linear(x, replace(prepared, bias=bias), fusion), real))


def fp4(rows: int, columns: int, group: int) -> tuple[Callable, Tensor]:
    """FP4, which is multiplied as int8 in groups if these have 16 features."""
    scale = torch.randint(-6, -3, (rows, -(-columns // group))).float().exp2().bfloat16()
    stored = replace(int4_weight(rows, columns, group, "none"), scale=scale, is_fp4=True, row_scale=torch.rand(rows) + 0.5)
    weight = quant_int4.prepare_weight(stored)
    assert weight.format == ("int8" if group == 16 else "int4")
    module = quant_int8 if group == 16 else quant_int4
    real = int4_reference.dequantize_int4(stored, torch.float64)
    case = lambda x, bias, fusion: module.packed_linear(x, replace(weight, bias=bias), fusion), real
    return case if group % 32 else Rounded(case)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """The linear in float64, by the reference."""
    wide = {name: value.double() for name in ("norm_weight", "norm_bias", "residual") if (value := getattr(fusion, name)) is not None}
    return linear_reference.around(
        x.double(), replace(fusion, **wide), lambda rows: rows @ weight.t() + (0 if bias is None else bias.double())
    )


def fused(rows: int, out: int, size: int, dtype: torch.dtype, parts: str) -> Fusion:
    """A fusion of the `parts`: n (RMS norm), l (layer norm), g (gate), i (input gate), r (residual)."""
    return Fusion(
        norm_kind="rms" if "n" in parts else "layer" if "l" in parts else None,
        norm_weight=torch.randn(size).to(dtype) if "n" in parts else None,
        norm_bias=torch.randn(size).to(dtype) if "l" in parts else None,
        norm_eps=1e-5,
        gate="silu" if "g" in parts else None,
        residual=torch.randn(rows, out).to(dtype) if "r" in parts else None,
        input_gate="gelu_tanh" if "i" in parts else None,
    )


def check(linear_and_weight: tuple[Callable, Tensor], rows: int, parts: str, dtype: torch.dtype = torch.float32) -> None:
    run, weight = linear_and_weight
    size, out = weight.shape[1], weight.shape[0] // (2 if "g" in parts else 1)
    width = 2 * size if "i" in parts else size
    x = torch.randn(rows, width + 8).to(dtype)[:, :width]
    bias = torch.randn(weight.shape[0]).to(dtype) if "b" in parts else None
    fusion = fused(rows, out, size, dtype, parts)
    y = run(x, bias, fusion)
    assert y.dtype == dtype and y.shape == (rows, out)
    tolerance = max(TOLERANCE[dtype], DIGITS_TOLERANCE) if isinstance(linear_and_weight, Rounded) else TOLERANCE[dtype]
    assert relative_error(y, expected(x, weight, bias, fusion)) < tolerance
