"""Quantized linears in the interpreter, compared with float64 products of the dequantized weights, and with the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.reference import activation as activation_reference
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import quant_fp8 as fp8_reference
from stoker.kernels.reference import quant_int4 as int4_reference
from stoker.kernels.reference import quant_int8 as int8_reference
from stoker.kernels.triton import activation
from stoker.kernels.triton.device import device_tuning
from stoker.kernels.triton.gemm.dense import launch as linear
from stoker.kernels.triton.gemm.quantized import activations as quant_activations
from stoker.kernels.triton.gemm.quantized import fp8 as quant_fp8
from stoker.kernels.triton.gemm.quantized import fp8_gemv as quant_gemv
from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
from stoker.kernels.triton.gemm.quantized import int8 as quant_int8
from stoker.kernels.triton.gemm.quantized import launch as quant_linear
from stoker.kernels.triton.gemm.quantized import tiles as quant_tuning
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear
from stoker.kernels.tuning.tiles import QuantTile, SkinnyTile
from stoker.kernels.types import PLAIN, Fusion

PARTS = ["", "l", "br", "nbgr"]  # n: RMS norm, l: layer norm, b: bias, g: gate, r: residual


def fusion(m: int, n: int, k: int, dtype: torch.dtype, parts: str) -> Fusion:
    kind = "rms" if "n" in parts else "layer" if "l" in parts else None
    return Fusion(
        norm_kind=kind,
        norm_weight=torch.randn(k).to(dtype) if kind else None,
        norm_bias=torch.randn(k).to(dtype) if kind == "layer" else None,
        norm_eps=1e-5 if kind else 0.0,
        gate="silu" if "g" in parts else None,
        residual=torch.randn(m, n).to(dtype) if "r" in parts else None,
    )


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, around: Fusion, rounded: object = lambda h: h) -> Tensor:
    """float64. `rounded` rounds the activations as the linear does."""
    h = x.double()
    if around.norm_kind == "layer":
        h = h - h.mean(-1, keepdim=True)
    if around.norm_kind:
        h = h / (h.square().mean(-1, keepdim=True) + around.norm_eps).sqrt() * around.norm_weight.double()
    if around.norm_bias is not None:
        h = h + around.norm_bias.double()
    y = rounded(h) @ weight.double().T + (0 if bias is None else bias.double())  # type: ignore[operator]
    if around.gate:
        gate, up = y.chunk(2, -1)
        y = gate * torch.sigmoid(gate) * up
    return y if around.residual is None else y + around.residual.double()


def problem(m: int, n: int, k: int, dtype: torch.dtype, parts: str) -> tuple[Tensor, Tensor | None, Fusion, int]:
    rows = 2 * n if "g" in parts else n
    x = torch.randn(m, k + 8).to(dtype)[:, :k]
    x[:, 3] *= 20  # an outlier, as real activations have
    return x, torch.randn(rows).to(dtype) if "b" in parts else None, fusion(m, n, k, dtype, parts), rows


def int8_weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (rows, k), dtype=torch.int8), torch.rand(rows) / (70 * k**0.5) + 1e-4


def fp8_weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
    return (torch.randn(rows, k) * 60).clamp(-448, 448).to(torch.float8_e4m3fn), (torch.rand(rows) + 0.5) / (60 * k**0.5)


def to_int8(h: Tensor) -> Tensor:
    step = h.abs().amax(-1, keepdim=True) / 127
    return (h / step).round() * step


def to_fp8(h: Tensor, step: Tensor | None = None) -> Tensor:
    step = h.abs().amax(-1, keepdim=True) / 448 if step is None else step
    return (h / step).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * step


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    ("m", "tile"),
    [(1, QuantTile(32, 32, encode=True)), (1, QuantTile(32, 64, 3, encode=True)), (2, QuantTile(16, 64, 2)), (5, QuantTile(32, 128))],
)
def test_int8_by_digits(m: int, tile: QuantTile, parts: str) -> None:
    n, k, dtype = 37, 200, torch.float32
    x, bias, around, rows = problem(m, n, k, dtype, parts)
    weight, scale = int8_weight(rows, k)
    want = expected(x, weight.double() * scale.double()[:, None], bias, around)
    packed = PackedWeight("int8", weight, scale, bias=bias)
    assert relative_error(quant_linear.quantized_activation_linear(x, packed, "digits", "int8", around, tile), want) < 3e-4
    assert relative_error(int8_reference.packed_linear(x, packed, around), want) < 3e-4
    assert not quant_linear.split_counters(x.device).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 3, 33, 130])
def test_int8_by_default(m: int, dtype: torch.dtype) -> None:
    x, bias, around, rows = problem(m, 40, 128, dtype, "nbr")
    weight, scale = int8_weight(rows, 128)
    want = expected(x, weight.double() * scale.double()[:, None], bias, around)
    assert relative_error(quant_int8.packed_linear(x, PackedWeight("int8", weight, scale, bias=bias), around), want) < TOLERANCE[dtype]


def test_int8_dequantized_and_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_int8, "MAX_DIGIT_ROWS", 40)
    monkeypatch.setattr(quant_linear, "_SCRATCH_BYTES", 128 * 48 * 4)
    x, bias, around, rows = problem(41, 150, 48, torch.float32, "nbgr")
    weight, scale = int8_weight(rows, 48)
    want = expected(x, weight.double() * scale.double()[:, None], bias, around)
    assert relative_error(quant_int8.packed_linear(x, PackedWeight("int8", weight, scale, bias=bias), around), want) < 1e-5
    ids = torch.tensor([3, 0, 149], dtype=torch.int32)
    packed = PackedWeight("int8", weight, scale)
    rows_of = [module.packed_embedding(ids, packed, torch.bfloat16) for module in (quant_int8, int8_reference)]
    assert torch.equal(*rows_of)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("m", "tile"), [(1, QuantTile(32, 64, 2, encode=True)), (9, QuantTile(32, 64)), (70, None)])
def test_w8a8(m: int, tile: QuantTile | None, static: bool, parts: str) -> None:
    n, k = 24, 100
    x, bias, around, rows = problem(m, n, k, torch.float32, parts)
    weight, scale = int8_weight(rows, k)
    step = torch.tensor([0.1]) if static else None
    packed = PackedWeight("int8", weight, scale, bias=bias, activations="static" if static else "token", input_scale=step)
    got = quant_linear.quantized_activation_linear(x, packed, "int8", "w8a8", around, tile)
    want = int8_reference.packed_linear(x, packed, around)
    # Activations that the rounding of the norm moves past the middle between two quantized values differ by one step.
    assert relative_error(got, want) < (2e-3 if around.norm_kind else 1e-5)
    if not static and not around.norm_kind:
        assert relative_error(got, expected(x, weight.double() * scale.double()[:, None], bias, around, to_int8)) < 1e-4


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("activations", ["token", "static", "none"])
@pytest.mark.parametrize("m", [3, 66])
def test_fp8(m: int, activations: str, parts: str) -> None:
    n, k = 24, 160
    x, bias, around, rows = problem(m, n, k, torch.float32, parts)
    weight, scale = fp8_weight(rows, k)
    step = torch.tensor([0.05]) if activations == "static" else None
    packed = PackedWeight("fp8", weight, scale, bias=bias, activations=activations, input_scale=step)
    got, want = quant_fp8.packed_linear(x, packed, around), fp8_reference.packed_linear(x, packed, around)
    assert relative_error(got, want) < (3e-3 if around.norm_kind and activations != "none" else 1e-5)
    if activations == "token" and not around.norm_kind:
        assert relative_error(got, expected(x, weight.double() * scale.double()[:, None], bias, around, to_fp8)) < 1e-4


def test_more_than_64_rows_have_small_tiles_only_where_all_run_at_the_same_time() -> None:
    tuning = device_tuning(torch.device("cpu"))
    for rows, n, k in ((65, 6144, 4096), (128, 6144, 4096), (192, 4096, 14336), (128, 4096, 4096), (192, 5120, 8192), (250, 24, 160)):
        tile = quant_tuning.one_round_tile(rows, n, k, False, 132, tuning)
        assert tile is not None and tile.block_n == 64, (rows, n, k)
        ctas = -(-rows // 64) * -(-n // 64) * tile.splits
        assert ctas <= 1.9 * 132
        stage = tile.block_k * (64 + 64)
        assert stage * tile.num_stages * (2 if ctas > 132 else 1) <= 227 << 10, "the CTAs do not fit at the same time"
    assert quant_tuning.one_round_tile(128, 4096, 4096, True, 132, tuning) is None
    for rows, n, k in ((192, 6144, 4096), (128, 8192, 14336), (65, 28672, 4096)):
        assert quant_tuning.one_round_tile(rows, n, k, False, 132, tuning) is None, (rows, n, k)


@pytest.mark.parametrize("activations", ["token", "static"])
@pytest.mark.parametrize(("n", "k", "parts"), [(24, 160, ""), (37, 4092, "br"), (300, 1028, "nbr"), (5, 64, "n")])
def test_fp8_gemv(n: int, k: int, parts: str, activations: str) -> None:
    x, bias, around, _ = problem(1, n, k, torch.bfloat16, parts)
    weight, scale = fp8_weight(n, k)
    step = torch.tensor([0.05]) if activations == "static" else None
    packed = PackedWeight("fp8", weight, scale, bias=bias, activations=activations, input_scale=step)
    assert quant_gemv.gemv_tile(x, packed, around) is not None
    got, want = quant_fp8.packed_linear(x, packed, around), fp8_reference.packed_linear(x.float(), packed, around)
    assert relative_error(got, want) < 1e-2
    x[0, 7] = float("nan")
    assert quant_fp8.packed_linear(x, replace(packed, activations="token", input_scale=None), around).isnan().all()


def test_fp8_quantized_by_the_linear_equals_quantized_before() -> None:
    x, bias, around, rows = problem(1, 40, 300, torch.bfloat16, "nbgr")
    weight, scale = fp8_weight(rows, 300)
    packed = PackedWeight("fp8", weight, scale, bias=bias, activations="token")
    by_linear, before = (
        quant_linear.quantized_activation_linear(x, packed, "fp8", "fp8", around, QuantTile(32, 64, 2, encode=encode))
        for encode in (True, False)
    )
    assert torch.equal(by_linear, before)


@pytest.mark.parametrize("m", [1, 3, 66])
def test_an_input_gate_equals_a_gate_applied_before(m: int) -> None:
    gates, bias, around, rows = problem(m, 24, 320, torch.bfloat16, "br")
    x = activation.gated(gates, "silu")
    with_input_gate = replace(around, input_gate="silu")
    weight, scale = fp8_weight(rows, 160)
    for kind in ("token", "none"):
        packed = PackedWeight("fp8", weight, scale, bias=bias, activations=kind)
        assert torch.equal(quant_fp8.packed_linear(gates, packed, with_input_gate), quant_fp8.packed_linear(x, packed, around))
    packed = PackedWeight("int8", *int8_weight(rows, 160), bias=bias)
    assert torch.equal(quant_int8.packed_linear(gates, packed, with_input_gate), quant_int8.packed_linear(x, packed, around))
    plain = activation_reference.gated(gates, "silu")
    assert torch.equal(int8_reference.packed_linear(gates, packed, with_input_gate), int8_reference.packed_linear(plain, packed, around))
    dense = torch.randn(rows, 160).to(x.dtype)
    assert torch.equal(linear.linear(gates, dense, bias, with_input_gate), linear.linear(x, dense, bias, around))


@pytest.mark.parametrize("m", [1, 3, 66])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_unfused_norms_are_applied_once_and_after_the_input_gate(kind: str, m: int) -> None:
    """A layer norm, and an RMS norm without weights, for each range of rows."""
    x, bias = torch.randn(m, 128) * 5, torch.randn(24)
    parameters = (torch.rand(64) + 0.5, torch.randn(64)) if kind == "layer" else (None, None)
    around = Fusion(kind, *parameters, norm_eps=1e-5, input_gate="silu")
    int8, fp8 = PackedWeight("int8", *int8_weight(24, 64), bias=bias), PackedWeight("fp8", *fp8_weight(24, 64), bias=bias)
    int4 = int4_weight(24, 64, 32, "int", bias)
    dense = torch.randn(24, 64) / 8

    def product(h: Tensor) -> Tensor:
        return h @ int4_reference.dequantize_int4(int4).T + bias

    for kernel, reference, packed, most in (
        (quant_int8, int8_reference, int8, 5e-4),
        (quant_int8, int8_reference, replace(int8, activations="token"), 2e-3),
        (quant_fp8, fp8_reference, replace(fp8, activations="token"), 1e-2),
        (quant_fp8, fp8_reference, fp8, 1e-5),
    ):
        assert relative_error(kernel.packed_linear(x, packed, around), reference.packed_linear(x, packed, around)) < most, kernel
    assert relative_error(linear.linear(x, dense, bias, around), linear_reference.linear(x, dense, bias, around)) < 1e-5
    want = linear_reference.around(x, around, product)
    assert relative_error(quant_int4.packed_linear(x, quant_int4.prepare_weight(int4), around), want) < 5e-4
    assert relative_error(ops.around(x, around, product), want) < 1e-6  # on a CPU, norms are sums in another order


@pytest.mark.parametrize("form", ["fp8", "int8", "digits"])
def test_rows_quantized_in_chunks_equal_rows_quantized_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 2 * 500).bfloat16(), torch.rand(500).bfloat16()
    arguments = (x, form, 512, 32, weight, 1e-5, None, "gelu")
    at_once = quant_activations.quantize_rows(*arguments)
    monkeypatch.setattr(quant_activations, "_MAX_ROW_IN_REGISTERS", 0)
    monkeypatch.setattr(quant_activations, "_CHUNK", 128)
    in_chunks = quant_activations.quantize_rows(*arguments)
    assert torch.allclose(at_once.scale, in_chunks.scale, rtol=1e-6)
    assert (at_once.values.float() - in_chunks.values.float()).abs().max() <= (32 if form == "fp8" else 1)  # one step of the largest values
    assert (at_once.values.view(torch.int8) != in_chunks.values.view(torch.int8)).float().mean() < 0.01


@pytest.mark.parametrize("rows", [8, 13])
def test_slabs_are_digits_in_another_order(rows: int) -> None:
    x, weight = torch.randn(rows, 300).bfloat16(), torch.rand(300).bfloat16()
    digits, slabs = (quant_activations.quantize_rows(x, form, 300, 0, weight, 1e-5) for form in ("digits", "slabs"))
    assert torch.equal(slabs.scale, digits.scale)
    assert slabs.values.shape == (32 if rows > 8 else 16, 300)
    for token in range(rows):
        coarse = token // 8 * 16 + token % 8
        assert torch.equal(slabs.values[coarse], digits.values[token])
        assert torch.equal(slabs.values[coarse + 8], digits.values[rows + token])


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("m", "block"), [(1, (16, 32)), (65, (128, 64)), (2, (3, 5))])
def test_block_fp8(m: int, block: tuple[int, int], parts: str) -> None:
    n, k = 32, 150
    x, bias, around, rows = problem(m, n, k, torch.float32, parts)
    weight, _ = fp8_weight(rows, k)
    scale = (torch.rand(-(-rows // block[0]), -(-k // block[1])) + 0.5) / (60 * k**0.5)
    packed = PackedWeight("fp8", weight, scale, group_size=block[1], block_rows=block[0], bias=bias, activations="group")
    got = quant_fp8.packed_linear(x, packed, around)
    assert relative_error(got, fp8_reference.packed_linear(x, packed, around)) < (3e-3 if around.norm_kind else 1e-5)


def int4_weight(rows: int, k: int, group: int, zero: str, bias: Tensor | None = None) -> PackedWeight:
    groups = -(-k // group)
    values, scale = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8), (torch.rand(rows, groups) + 0.5) / (5 * k**0.5)
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8) if zero == "int" else None
    if zero == "float":
        zeros = (-torch.rand(rows, groups) / k**0.5).half()
    if zero == "e2m1":
        return PackedWeight(
            "int4",
            values,
            (torch.rand(scale.shape) + 0.1).to(torch.float8_e4m3fn).bfloat16(),
            None,
            group,
            bias=bias,
            is_fp4=True,
            row_scale=(torch.rand(rows) + 0.5) / k**0.5,
        )
    return PackedWeight("int4", values, scale.half(), zeros, group, bias=bias)


@pytest.mark.parametrize(
    ("zero", "group", "k"),
    [
        ("none", 16, 96),
        ("int", 48, 96),
        ("int", 32, 200),
        ("none", 32, 128),
        ("float", 64, 256),
        ("int", 128, 300),
        ("float", 256, 520),
        ("e2m1", 32, 200),
    ],
)
@pytest.mark.parametrize(("m", "parts"), [(1, "n"), (3, "bgr"), (34, "ngr")])
def test_int4(m: int, parts: str, group: int, k: int, zero: str) -> None:
    x, bias, around, rows = problem(m, 24, k, torch.float32, parts)
    weight = int4_weight(rows, k, group, zero, bias)
    want = expected(x, int4_reference.dequantize_int4(weight, torch.float64), bias, around)
    assert relative_error(quant_int4.packed_linear(x, quant_int4.prepare_weight(weight), around), want) < 5e-4


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_int4_reference_with_strided_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 136).to(dtype)[:, :128], int4_weight(24, 128, 32, "int")
    want = expected(x, int4_reference.dequantize_int4(weight, torch.float64), None, PLAIN)
    assert relative_error(int4_reference.packed_linear(x, int4_reference.prepare_weight(weight)), want) < 1e-2


@pytest.mark.parametrize("zero", ["none", "int", "float"])
def test_int4_tiles(zero: str) -> None:
    x, bias, around, rows = problem(1, 40, 512, torch.bfloat16, "nbgr")
    weight = int4_weight(rows, 512, 32, zero, bias)
    want = expected(x, int4_reference.dequantize_int4(weight, torch.float64), bias, around)
    packed = quant_int4.prepare_weight(weight)
    for tile in (QuantTile(32, 128, 2, encode=True), QuantTile(16, 256, 1), QuantTile(64, 64, 4, encode=True)):
        assert relative_error(quant_linear.quantized_activation_linear(x, packed, "digits", "int4/32", around, tile), want) < 1e-2
    assert relative_error(quant_linear.plain_activation_linear(x, packed, around, QuantTile(32, 128)), want) < 1e-2


@pytest.mark.parametrize(("m", "group", "parts"), [(9, 32, "ng"), (33, 32, "br"), (17, 64, "br"), (35, 128, "ng")])
@pytest.mark.parametrize("zero", ["none", "int", "float", "e2m1"])
def test_int4_dequantized_in_registers(parts: str, zero: str, m: int, group: int) -> None:
    x, bias, around, rows = problem(m, 72, 648, torch.bfloat16, parts)
    assert not quant_tuning.digits_are_faster(m, group)
    weight = int4_weight(rows, 648, group, zero, bias)
    want = expected(x, int4_reference.dequantize_int4(weight, torch.float64), bias, around)
    assert relative_error(quant_int4.packed_linear(x, quant_int4.prepare_weight(weight), around), want) < 1e-2


@pytest.mark.parametrize(
    ("rows", "group", "dtype", "launcher"),
    [
        (4, 32, torch.bfloat16, "skinny_linear"),
        (5, 32, torch.bfloat16, "skinny_int4_linear"),
        (64, 32, torch.float16, "skinny_int4_linear"),
        (65, 32, torch.bfloat16, "dequantized_linear"),
        (9, 32, torch.float32, "quantized_activation_linear"),
        (1, 16, torch.bfloat16, "skinny_int4_linear"),
        (8, 64, torch.bfloat16, "skinny_linear"),
        (9, 64, torch.bfloat16, "skinny_int4_linear"),
        (8, 128, torch.bfloat16, "skinny_linear"),
        (16, 128, torch.bfloat16, "quantized_activation_linear"),
        (17, 128, torch.bfloat16, "plain_activation_linear"),
    ],
)
def test_int4_launcher_by_rows(rows: int, group: int, dtype: torch.dtype, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher that packed_linear calls on a device. Nothing runs."""
    called: list[str] = []
    for name in ("skinny_linear", "skinny_int4_linear", "quantized_activation_linear", "plain_activation_linear", "dequantized_linear"):
        monkeypatch.setattr(quant_int4, name, lambda *args, name=name: called.append(name))
    values, scale = torch.empty(64, 512, dtype=torch.uint8, device="meta"), torch.empty(64, 1024 // group, device="meta")
    weight = quant_int4.prepare_weight(PackedWeight("int4", values, scale, None, group))
    quant_int4.packed_linear(torch.empty(rows, 1024, dtype=dtype, device="meta"), weight)
    assert called == [launcher]


SKINNY_TILES = [SkinnyTile(4, 1, 8, 1), SkinnyTile(2, 2, 4, 4), SkinnyTile(2, 8, 1, 2)]


def skinny_results(x: Tensor, weight: PackedWeight, around: Fusion) -> list[Tensor]:
    results = [skinny_linear(x, weight, around, tile) for tile in SKINNY_TILES]
    assert not quant_linear.split_counters(x.device).any()
    return results


@pytest.mark.parametrize(
    ("m", "parts", "zero", "group", "k"),
    [
        *((1, "nbgr", *grid) for grid in (("none", 64, 648), ("int", 64, 648), ("float", 128, 648), ("int", 128, 648), ("int", 32, 640))),
        (5, "br", "none", 64, 648), (5, "br", "float", 128, 648), (5, "br", "int", 32, 640),
        (9, "lgr", "int", 64, 648), (9, "lgr", "int", 128, 648),
    ],
)  # fmt: skip
def test_skinny_int4(m: int, parts: str, zero: str, group: int, k: int) -> None:
    x, bias, around, rows = problem(m, 40, k, torch.float32, parts)
    weight = int4_weight(rows, k, group, zero, bias)
    want = expected(x, int4_reference.dequantize_int4(weight, torch.float64), bias, around)
    for got in skinny_results(x, quant_int4.prepare_weight(weight), around):
        assert relative_error(got, want) < 3e-4


@pytest.mark.parametrize(("m", "parts"), [(1, "nbgr"), (5, "br"), (17, "lgr")])
def test_skinny_int8(m: int, parts: str) -> None:
    x, bias, around, rows = problem(m, 40, 576, torch.float32, parts)
    weight, scale = int8_weight(rows, 576)
    want = expected(x, weight.double() * scale.double()[:, None], bias, around)
    for got in skinny_results(x, PackedWeight("int8", weight, scale, bias=bias), around):
        assert relative_error(got, want) < 3e-4


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("m", "parts"), [(1, "nbgr"), (1, "l"), (5, "br"), (9, "ngr")])
def test_skinny_fp8(m: int, parts: str, static: bool) -> None:
    x, bias, around, rows = problem(m, 40, 576, torch.float32, parts)
    weight, scale = fp8_weight(rows, 576)
    step = torch.tensor([0.05]) if static else None
    packed = PackedWeight("fp8", weight, scale, bias=bias, activations="static" if static else "token", input_scale=step)
    want = fp8_reference.packed_linear(x, packed, around)
    for got in skinny_results(x, packed, around):
        assert relative_error(got, want) < (3e-3 if around.norm_kind else 1e-5)


def test_int4_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_int4, "MAX_SKINNY_ROWS", 40)
    monkeypatch.setattr(quant_linear, "_SCRATCH_BYTES", 1)
    x, bias, around, rows = problem(41, 150, 90, torch.float32, "nbgr")
    for zero in ("none", "int", "float"):
        weight = int4_weight(rows, 90, 32, zero, bias)
        want = expected(x, int4_reference.dequantize_int4(weight, torch.float64), bias, around)
        assert relative_error(quant_int4.packed_linear(x, quant_int4.prepare_weight(weight), around), want) < 1e-5


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("form", ["fp8", "int8", "digits"])
def test_a_row_with_nan_gets_a_nan_scale(form: str, gate: str | None) -> None:
    """Rows that consist of one chunk, and of three."""
    for k in (64, 700):
        x = torch.randn(4, k * (2 if gate else 1))
        x[1, 5] = x[2, k - 1] = float("nan")
        quantized = quant_activations.quantize_rows(x, form, k, gate=gate)
        assert quantized.scale.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("static", [False, True])
def test_rows_of_several_chunks_are_the_nearest_values(static: bool, gate: str | None) -> None:
    """The largest value of a row is in its last chunk; with a static scale, values above 448 units are clamped."""
    x = torch.randn(3, 1400 if gate else 700).bfloat16()
    x[:, 690] = torch.tensor([9.0, 7.7, 8.3])
    real = (activation.gated(x, gate) if gate else x).double()
    step = torch.tensor([real.abs().max() / 900 if static else 0.0])
    quantized = quant_activations.quantize_rows(x, "fp8", 700, input_scale=step if static else None, gate=gate)
    steps = step.double().expand(3, 1) if static else real.abs().amax(1, keepdim=True) / 448
    assert torch.allclose(quantized.scale.double()[:, None], steps, rtol=1e-6)
    different = quantized.values.double() * steps != to_fp8(real, steps)
    assert different.double().mean() < 0.01, "more than values halfway between two e4m3 values"


def test_no_rows() -> None:
    weight, scale = int8_weight(8, 32)
    assert quant_int8.packed_linear(torch.zeros(0, 32), PackedWeight("int8", weight, scale)).shape == (0, 8)
    fp8 = PackedWeight("fp8", weight.float().to(torch.float8_e4m3fn), scale, activations="token")
    assert quant_fp8.packed_linear(torch.zeros(0, 32), fp8).shape == (0, 8)


def test_a_residual_of_another_shape_is_rejected() -> None:
    weight, scale = int8_weight(8, 32)
    with pytest.raises(ValueError, match="residual"):
        quant_int8.packed_linear(torch.zeros(1, 32), PackedWeight("int8", weight, scale), Fusion(residual=torch.zeros(1, 5)))


@pytest.mark.parametrize("k", [300, 40000])
def test_rows_in_the_order_of_choices(k: int) -> None:
    """Row c of the result is row order[c] ÷ top_k, with the bits of a launch without an order. 40,000 features are read twice."""
    x, order = torch.randn(7, k).bfloat16(), torch.randperm(21).int()[:20]
    plain, ordered = quant_activations.quantize_rows(x, "fp8", k), quant_activations.quantize_rows(x, "fp8", k, order=order, top_k=3)
    rows = order.long() // 3
    assert torch.equal(ordered.values.view(torch.uint8), plain.values.view(torch.uint8)[rows])
    assert torch.equal(ordered.scale, plain.scale[rows])
