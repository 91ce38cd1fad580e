"""Fused layers of all weight formats, and their results in float64.

Triton is imported inside functions, because a process that interprets it must set TRITON_INTERPRET before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from oracle import relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels.reference.fused_layer import fused_layer as one_by_one
from stoker.kernels.reference.linear import around
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.types import PLAIN, FusedLayer, FusedLinear, Fusion
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int8 import quantize_rows
from stoker.quant.linear_ops import PackedLinear

FORMS = ["dense", "fp8", "bytes", "int4 none", "int4 int", "int4 float", "int4 int 64", "int4 none 32", "int4 float 32"]
Results = tuple[Tensor, Tensor | None]  # the residual stream, and q, k and v of the next layer
BOUND = 0.01  # relative error, when only the activations between linears are rounded to bfloat16


def linear(form: str, n: int, k: int, bias: bool, dtype: torch.dtype, device: str) -> tuple[PackedWeight, Tensor]:
    """The weight in the layout of the GPU kernels, and its values in float64."""
    weight = torch.randn(n, k, device=device) * k**-0.5 * torch.rand(n, 1, device=device).exp()
    given = torch.randn(n).bfloat16().to(device) if bias else None
    if form == "dense":
        return PackedWeight("dense", weight.to(dtype), bias=given), weight.to(dtype).double()
    if form == "fp8":
        stored = Fp8(compensate=False).quantize(weight, LinearSpec(name="a", in_features=k, parts=(n,)))
        codes, scale = stored["weight"], stored["scale"]
        packed = PackedWeight("fp8", codes, scale, bias=given, activations="token")
        return packed, codes.double() * scale.double()[:, None]
    if form == "bytes":
        codes, scale = quantize_rows(weight)
        return PackedWeight("int8", codes, scale, bias=given), codes.double() * scale.double()[:, None]
    return int4_linear(*(*form.split()[1:], "128")[:2], n, k, given, device)


def int4_linear(kind: str, size: str, n: int, k: int, bias: Tensor | None, device: str) -> tuple[PackedWeight, Tensor]:
    from stoker.kernels.triton.gemm.quantized.int4 import prepare_weight

    group = int(size)
    groups = -(-k // group)
    scale = (torch.rand(n, groups) * 0.5 + 0.5).mul(k**-0.5 / 4).half()
    zero = torch.randint(5, 11, (n, groups), dtype=torch.uint8) if kind == "int" else None
    if kind == "float":
        zero = (-8 * scale.float() + torch.randn(n, groups) * k**-0.5 / 8).half()
    parts = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), scale, zero
    weight = PackedWeight("int4", *(None if part is None else part.to(device) for part in parts), group, bias=bias)  # type: ignore[arg-type]
    return prepare_weight(weight), dequantize_int4(weight, torch.float64)


def problem(
    form: str, shape: tuple[int, ...], dtype: torch.dtype, biases: bool, last: bool, gate: str, device: str
) -> tuple[FusedLayer, list[Tensor]]:
    """A fused layer, and its weights in float64. `shape`: features of the heads, of the residual stream, of the MLP, and of qkv."""
    heads, hidden, size, qkv = shape
    norm = lambda: Fusion("rms", (torch.rand(hidden) + 0.5).to(dtype).to(device), None, 1e-5)  # noqa: E731
    linears, wide = [], []
    for n, k, fusion in (
        (hidden, heads, PLAIN),
        (2 * size, hidden, replace(norm(), gate=gate)),
        (hidden, size, PLAIN),
        (qkv, hidden, norm()),
    ):
        weight, real = linear(form, n, k, biases, dtype, device)
        linears.append(FusedLinear(PackedLinear(weight), weight, fusion))
        wide.append(real)
    return FusedLayer(*linears[:3], None if last else linears[3]), wide


def rank_problems(
    form: str, shape: tuple[int, ...], dtype: torch.dtype, last: bool, num_ranks: int, device: str
) -> tuple[list[FusedLayer], list[list[Tensor]]]:
    """The layers of `num_ranks` ranks with biases, and their weights in float64. `shape`: of each rank, as in `problem`.

    Biases of the linears that are summed over ranks belong to the first one.
    """
    layers, weights = [], []
    for rank in range(num_ranks):
        layer, real = problem(form, shape, dtype, True, last, "silu", device)
        if rank:
            layer = replace(layer, out=_without_bias(layer.out), down=_without_bias(layer.down))
        layers.append(layer)
        weights.append(real)
    return layers, weights


def _without_bias(linear: FusedLinear) -> FusedLinear:
    assert linear.weight is not None
    weight = replace(linear.weight, bias=None)
    return FusedLinear(PackedLinear(weight), weight, linear.fusion)


def _in_float64(parts: FusedLayer, weights: list[Tensor]) -> FusedLayer:
    """The layer without any rounding in and between its linears."""
    linears = []
    for one, real in zip(parts.linears, weights, strict=False):
        assert one.weight is not None
        bias = 0 if one.weight.bias is None else one.weight.bias.double()
        fusion = replace(one.fusion, norm_weight=None if one.fusion.norm_weight is None else one.fusion.norm_weight.double())
        product = partial(lambda h, w, b: h @ w.T + b, w=real, b=bias)
        linears.append(FusedLinear(lambda h, f, product=product: around(h, f, product), None, fusion))
    return FusedLayer(*linears[:3], linears[3] if len(linears) > 3 else None)


def in_float64(x: Tensor, stream: Tensor, parts: FusedLayer, weights: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The fused layer without any rounding between its linears."""
    return one_by_one(x.double(), stream.double(), _in_float64(parts, weights))


def ranks_one_by_one(x: list[Tensor], stream: Tensor, ranks: list[FusedLayer]) -> list[Results]:
    """The results of all ranks, one linear after another, from the x of each."""
    h = stream + sum(layer.out.alone(own, layer.out.fusion) for own, layer in zip(x, ranks, strict=True))
    y = h + sum(layer.down.alone(layer.up.alone(h, layer.up.fusion), layer.down.fusion) for layer in ranks)
    return [(y, None if layer.qkv is None else layer.qkv.alone(y, layer.qkv.fusion)) for layer in ranks]


def check_rank(
    form: str, rank: int, got: Results, x: list[Tensor], stream: Tensor, ranks: list[FusedLayer], weights: list[list[Tensor]]
) -> None:
    """The results of one rank against float64, and with FP8 against one linear after another, as in `check`."""
    exact = [_in_float64(layer, real) for layer, real in zip(ranks, weights, strict=True)]
    want = ranks_one_by_one([own.double() for own in x], stream.double(), exact)[rank]
    _check_errors(form, errors(got, want), errors(ranks_one_by_one(x, stream, ranks)[rank], want) if form == "fp8" else [])


def errors(got: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None]) -> list[float]:
    assert [y is None for y in got] == [y is None for y in want]
    return [
        relative_error(mine.cpu(), theirs.cpu()) for mine, theirs in zip(got, want, strict=True) if mine is not None and theirs is not None
    ]


def check(form: str, got: tuple[Tensor, Tensor | None], x: Tensor, stream: Tensor, parts: FusedLayer, weights: list[Tensor]) -> None:
    """A kernel's result against float64. With FP8 a norm that differs by one bit moves all quantized values, so the bound is the error of
    the linears one after another."""
    want = in_float64(x, stream, parts, weights)
    _check_errors(form, errors(got, want), errors(one_by_one(x, stream, parts), want) if form == "fp8" else [])


def _check_errors(form: str, wrong: list[float], apart: list[float]) -> None:
    """apart: the errors of one linear after another."""
    if form == "fp8":
        assert all(mine < 1.2 * theirs < 0.1 for mine, theirs in zip(wrong, apart, strict=True)), (wrong, apart)
    else:
        assert max(wrong) < BOUND, wrong
