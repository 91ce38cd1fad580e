"""The C kernels of the CPU against float64 and against the references."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import Case, expected_attention, relative_error
from torch import Tensor

from stoker.core.forward_batch import KVCache
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native import attention, build, fused_layer, library, linear, quant_fp8, quant_int4, quant_int8, rope
from stoker.kernels.reference import activation as activation_reference
from stoker.kernels.reference import attention as attention_reference
from stoker.kernels.reference import fused_layer as fused_layer_reference
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import quant_int4 as int4_reference
from stoker.kernels.reference import quant_int8 as int8_reference
from stoker.kernels.reference import rope as rope_reference
from stoker.kernels.types import PLAIN, AttentionParams, FusedLayer, FusedLinear, Fusion, HeadNorms, Rotary

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3}  # bfloat16: one rounding of the result
DIGITS_TOLERANCE = 8e-5  # of activations that are rounded to 16 bits (digits.h)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler is installed")


@pytest.fixture
def _no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a reference runs instead of the kernel."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the reference ran")

    for module, name in (
        (linear_reference, "linear"), (int8_reference, "packed_linear"), (int4_reference, "packed_linear"),
        (rope_reference, "rope_store"), (attention_reference, "attention"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)


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


@needs_compiler
@kernel_only
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("parts", ["", "nbgr"])
def test_every_number_of_rows(rows: int, parts: str) -> None:
    check(dense(34, 80, torch.float32), rows, parts)
    check(int8(34, 80), min(rows, quant_int8.max_rows()), parts)
    check(int4(34, 80, 32, "int"), rows, parts)
    check(grouped(34, 80, 16, True), rows, parts)


@needs_compiler
@kernel_only
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", ["", "b", "l", "n", "gr", "ibr", "nbgr"])
def test_every_fusion(parts: str, dtype: torch.dtype) -> None:
    for case in (
        dense(48, 96, torch.float32),
        dense(48, 96, torch.bfloat16),
        int8(48, 96),
        int4(48, 96, 64, "float"),
        grouped(48, 96, 64, True),
        fp4(48, 96, 16),
        fp4(48, 96, 32),
    ):
        check(case, 3, parts, dtype)


@needs_compiler
@kernel_only
@pytest.mark.parametrize("out", [1, 3, 17, 31, 200])
@pytest.mark.parametrize("size", [1, 2, 15, 33, 130, 577])
@pytest.mark.parametrize("rows", [1, 3])
def test_sizes_that_are_no_multiple_of_a_vector(rows: int, size: int, out: int) -> None:
    for case in (dense(out, size, torch.float32), dense(out, size, torch.bfloat16), int8(out, size), grouped(out, size, 16, True)):
        check(case, rows, "lr")
    if size % 2 == 0:
        check(int4(out, size, 32, "int"), rows, "lr")


@needs_compiler
@kernel_only
@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize("group", [32, 64, 96, 128])
@pytest.mark.parametrize("size", [128, 160, 276, 2300])
def test_int4_with_a_shorter_last_group(size: int, group: int, zero: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check(int4(21, size, group, zero, dtype), 2, "n")


def in_rows(blocks: Tensor, rows: int, row_bytes: int, header: int, group_bytes: int) -> tuple[Tensor, Tensor]:
    """The values uint8 [rows, row_bytes] and headers [rows / 16, groups, header] of blocks, in another way than the kernels read them."""
    values, headers = [], []
    for block in blocks:
        at, words = 0, []
        while at < len(block):
            headers.append(block[at : at + header])
            end = min(at + header + 16 * group_bytes, len(block))
            words.append(block[at + header : end].view(-1, 16, 4).transpose(0, 1).flatten(1))
            at = end
        values.append(torch.cat(words, 1))
    return torch.cat(values)[:rows, :row_bytes], torch.stack(headers).unflatten(0, (len(blocks), -1))


@needs_compiler
@pytest.mark.parametrize(("rows", "columns", "group"), [(32, 128, 32), (35, 276, 64), (3, 100, 96), (48, 64, 128)])
@pytest.mark.parametrize("zero", ["none", "int", "float"])
def test_blocks_hold_the_stored_values_and_scales(rows: int, columns: int, group: int, zero: str) -> None:
    stored = int4_weight(rows, columns, group, zero)
    weight = quant_int4.prepare_weight(stored)
    assert (weight.out_features, weight.in_features) == (rows, columns)
    if weight.layout == "stored":
        pytest.skip("this processor reads rows")
    assert weight.values.data_ptr() % 64 == 0 and weight.scale is weight.zero is None
    kinds = [torch.float16, *{"none": [], "int": [torch.uint8], "float": [torch.float16]}[zero]]
    sizes = [16 * kind.itemsize for kind in kinds]
    values, headers = in_rows(weight.values, rows, columns // 2, sum(sizes), group // 2)
    assert torch.equal(values, stored.values)
    for kind, part, original in zip(kinds, headers.split(sizes, 2), (stored.scale, stored.zero), strict=False):
        found = part.contiguous().view(kind).transpose(1, 2).flatten(0, 1)
        assert original is not None and torch.equal(found[:rows], original) and not found[rows:].any()


@needs_compiler
@kernel_only
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_weights_in_groups_as_they_are_stored(rows: int) -> None:
    """Processors without AVX512-VNNI read them so, and every processor reads groups of 16."""
    for weight in (
        int4_weight(36, 100, 32, "int"),
        int4_weight(36, 160, 64, "float"),
        replace(int4_weight(36, 96, 32, "none"), is_fp4=True),
    ):
        real = int4_reference.dequantize_int4(weight, torch.float64)
        check((lambda x, bias, fusion, weight=weight: quant_int4.packed_linear(x, replace(weight, bias=bias), fusion), real), rows, "nbgr")
    weight = grouped_weight(36, 100, 32, True)
    real = int8_reference.widen_groups(weight).double()
    check((lambda x, bias, fusion: quant_int8.packed_linear(x, replace(weight, bias=bias), fusion), real), rows, "nb")


@needs_compiler
@kernel_only
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("inner", [1, 7, 16, 25, 40, 47])
def test_gates_whose_factors_begin_within_a_block(inner: int, rows: int) -> None:
    for case in (int4(2 * inner, 96, 32, "int"), fp4(2 * inner, 96, 32), grouped(2 * inner, 100, 32, True)):
        check(case, rows, "nbgr")


@needs_compiler
@kernel_only
def test_arguments_that_only_the_widened_product_supports() -> None:
    """No reference reads blocks."""
    if quant_int4.prepare_weight(int4_weight(20, 64, 32, "none")).layout == "stored":
        pytest.skip("this processor reads rows")
    for run, weight in (int4(20, 64, 32, "float"), grouped(20, 64, 32, False)):
        for rows in (2, 30):
            x, bias = torch.randn(rows, 64), torch.randn(20)
            want = x.double() @ weight.t()
            assert relative_error(run(x.half(), None, PLAIN), want) < 1e-3
            assert relative_error(run(x.t().contiguous().t(), bias.double(), PLAIN), want + bias) < 1e-4


@needs_compiler
@kernel_only
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("out", [17, 3000])
@pytest.mark.parametrize("size", [128, 276])
def test_70_rows_of_a_weight_in_groups(size: int, out: int, dtype: torch.dtype) -> None:
    for zero in ("none", "int", "float"):
        check(int4(out, size, 64, zero), 70, "nb", dtype)
    check(fp4(out, size, 64), 70, "nb", dtype)
    for shifted in (False, True):
        check(grouped(out, size + 1, 32, shifted), 70, "ibr", dtype)


@needs_compiler
@kernel_only
def test_70_rows_of_a_weight_that_is_widened_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors for which gemm.c has no code."""
    found = library.kernels()
    assert not isinstance(found, str)
    monkeypatch.setattr(linear, "kernels", lambda: found._replace(gemm=lambda arguments: 1))
    for size, out in ((128, 3000), (276, 17)):
        check(int4(out, size, 64, "float"), 70, "nb")
        check(fp4(out, size, 64), 70, "nb", torch.bfloat16)
        check(grouped(out, size + 1, 32, True), 70, "ibr")


@needs_compiler
@kernel_only
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("size", [128, 160, 277, 2301])
def test_int8_with_a_shorter_last_group(size: int, group: int, shifted: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check(grouped(21, size, group, shifted, dtype), 2, "n")


@needs_compiler
@pytest.mark.parametrize("rows", [1, 40])
def test_more_groups_than_the_buffer_holds(rows: int) -> None:
    """Llama-70B in Q6_K has 28,672 features in groups of 16: 1,792 groups."""
    assert quant_int8.supports_groups(grouped_weight(3, 1024 * 16, 16, True)) and not quant_int8.supports_groups(
        grouped_weight(3, 1025 * 16, 16, True)
    )
    check(grouped(20, 1025 * 16, 16, True), rows, "nb")
    check(int4(20, 1025 * 32, 32, "int"), rows, "nb")
    check(grouped(20, 1024 * 16, 16, True), rows, "nb")


@needs_compiler
@kernel_only
def test_small_float16_scales_keep_their_value() -> None:
    weight = int4_weight(40, 64, 32, "none")
    assert weight.scale is not None
    weight.scale.copy_(torch.arange(1, 81).view(40, 2).to(torch.float16) * 2**-24)  # subnormal
    x = torch.randn(1, 64)
    exact = x.double() @ int4_reference.dequantize_int4(weight, torch.float64).t()
    assert relative_error(quant_int4.packed_linear(x, quant_int4.prepare_weight(weight)), exact) < DIGITS_TOLERANCE


@needs_compiler
@kernel_only
@pytest.mark.parametrize("name", activation_reference.ACTIVATIONS)
def test_every_activation(name: str) -> None:
    run, weight = dense(64, 32, torch.float32)
    x = torch.randn(2, 32) * torch.tensor([[3.0], [60.0]])
    fusion = Fusion(gate=name)
    assert relative_error(run(x, None, fusion), expected(x, weight, None, fusion)) < 2e-6


@needs_compiler
@kernel_only
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_row(value: float) -> None:
    for run, _ in (dense(20, 64, torch.float32), int8(20, 64), int4(20, 64, 32, "int"), grouped(20, 64, 16, True)):
        x = torch.randn(3, 64)
        x[1, 5] = value
        for fusion in (PLAIN, Fusion(norm_kind="rms", norm_eps=1e-5)):
            found = run(x, None, fusion)
            assert not found[1].isfinite().any() and found[[0, 2]].isfinite().all()


@needs_compiler
@kernel_only
def test_a_row_does_not_depend_on_the_others() -> None:
    int4_weights = int4(50, 130, 32, "int"), int4(15, 130, 32, "float"), fp4(50, 130, 32)
    cases = dense(50, 130, torch.float32), grouped(50, 130, 32, False), *int4_weights
    for count, (run, weight) in [(4, int8(50, 130)), *((16, case) for case in cases)]:
        x, norm = torch.randn(count, 130), Fusion(norm_kind="rms", norm_eps=1e-5)
        together = run(x, None, norm)
        assert together.shape[1] == len(weight)
        for first, last in ((0, 1), (1, 2), (1, 4), (0, count // 2 + 1)):
            assert torch.equal(run(x[first:last], None, norm), together[first:last])


@needs_compiler
@kernel_only
def test_the_number_of_threads_does_not_change_results() -> None:
    threads = torch.get_num_threads()
    try:
        for run, _ in (dense(1000, 64, torch.float32), int8(3000, 64), int4(5000, 64, 32, "int"), grouped(3000, 64, 32, True)):
            x, found = torch.randn(2, 64), []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(run(x, None, PLAIN))
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(threads)


def fused_layer_of(form: str, dtype: torch.dtype, hidden: int = 96, inner: int = 136, heads: int = 64, last: bool = False) -> FusedLayer:
    """A fused layer with biases, all of whose weights have one format."""

    def one(rows: int, columns: int, fusion: Fusion = PLAIN) -> FusedLinear:
        bias = torch.randn(rows).to(dtype)
        if form == "int8":
            values, scale = torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows) / (70 * columns**0.5)
            weight = PackedWeight("int8", values, scale, bias=bias)
        elif form == "fp8":
            values, scale = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn), torch.rand(rows) / (100 * columns**0.5)
            weight = PackedWeight("fp8", values, scale, bias=bias, activations="token")
        elif form == "int8 in groups":
            weight = replace(grouped_weight(rows, columns, 16, True), bias=bias)
        elif form.startswith("int4"):
            weight = replace(int4_weight(rows, columns, 32, form.removeprefix("int4 ")), bias=bias)
        else:
            weight = PackedWeight("dense", (torch.randn(rows, columns) / columns**0.5).to(getattr(torch, form)), bias=bias)
            return FusedLinear(lambda x, fusion: linear.linear(x, weight.values, bias, fusion), weight, fusion)
        module = quant_int4 if form.startswith("int4") else quant_fp8 if form == "fp8" else quant_int8
        weight = weight if form == "fp8" else module.prepare_weight(weight)
        return FusedLinear(lambda x, fusion: module.packed_linear(x, weight, fusion), weight, fusion)

    norm = Fusion(norm_kind="rms", norm_weight=torch.randn(hidden).to(dtype), norm_eps=1e-5)
    qkv = None if last else one(heads + 32, hidden, norm)
    return FusedLayer(one(hidden, heads), one(2 * inner, hidden, replace(norm, gate="silu")), one(hidden, inner), qkv)


FORMS = ["float32", "bfloat16", "fp8", "int8", "int8 in groups", "int4 none", "int4 int", "int4 float"]


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_fused_layer_equals_its_linears(form: str, last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise, for any number of rows and threads, with x of a larger row stride, in one call."""
    threads, parts = torch.get_num_threads(), fused_layer_of(form, dtype, hidden=480, inner=1000, heads=160, last=last)
    max_rows = next(rows for rows in range(100, 0, -1) if fused_layer.supports_fused_layer(parts, rows))
    assert max_rows == {"int8": quant_int8.max_rows(), "fp8": linear.MAX_FP8_ROWS}.get(form, 16)
    inputs = {
        rows: (torch.randn(rows, 168).to(dtype)[:, :160], torch.randn(rows, 480).to(dtype))
        for rows in (1, 2, 3, 5, 7, 8, 15, 16)
        if rows <= max_rows
    }
    expected = {rows: fused_layer_reference.fused_layer(*both, parts) for rows, both in inputs.items()}
    monkeypatch.setattr(fused_layer_reference, "fused_layer", lambda *given: pytest.fail("the reference ran"))
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            for rows, (x, stream) in inputs.items():
                before = stream.clone()
                after, qkv = fused_layer.fused_layer(x, stream, parts)
                assert torch.equal(after, expected[rows][0]) and torch.equal(stream, before)
                assert (qkv is None and last) or torch.equal(qkv, expected[rows][1])  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_unsupported_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = fused_layer_of("float32", torch.float32)
    assert fused_layer.supports_fused_layer(parts, 16) and not fused_layer.supports_fused_layer(parts, 17)
    unknown = replace(parts.up, weight=replace(parts.up.weight, format="fp8"))  # type: ignore[type-var]
    narrow = fused_layer_of("float32", torch.float32, hidden=64)
    for other in (unknown, replace(parts.up, weight=None), narrow.up):
        assert not fused_layer.supports_fused_layer(replace(parts, up=other), 1)
    x, stream = torch.randn(2, 64), torch.randn(2, 96)
    (after, _), halves = fused_layer.fused_layer(x, stream, parts), [torch.randn(2, 192)[:, ::2], stream.double()]
    assert relative_error(fused_layer.fused_layer(x, stream.clone().t().contiguous().t(), parts)[0], after.double()) < 1e-6
    ran: list[object] = []
    monkeypatch.setattr(fused_layer_reference, "fused_layer", lambda *given: ran.append(given))
    for refused in (
        (x[:, :32], stream),
        (x, halves[0]),
        (x, halves[1]),
        (x.half(), stream.half()),
        (torch.randn(17, 64), torch.randn(17, 96)),
    ):
        fused_layer.fused_layer(*refused, parts)
    assert len(ran) == 5


@needs_compiler
def test_cached_arguments_are_freed_with_their_layer() -> None:
    parts = fused_layer_of("int8", torch.float32)
    before = len(fused_layer._packed_layers)
    assert fused_layer.supports_fused_layer(parts, 1) and len(fused_layer._packed_layers) == before + 1
    del parts
    assert len(fused_layer._packed_layers) == before


@needs_compiler
def test_empty_and_unsupported_arguments() -> None:
    run, _ = int8(8, 32)
    assert run(torch.randn(0, 32), None, PLAIN).shape == (0, 8)
    x, (_, weight) = torch.randn(3, 64), dense(8, 32, torch.float32)
    apart = weight.float().repeat(1, 2)[:, ::2]  # not dense
    assert relative_error(linear.linear(x[:, :32], apart), x[:, :32].double() @ apart.double().t()) < 1e-6
    assert linear.linear(x.half()[:, :32], weight.half()).dtype == torch.float16
    assert relative_error(linear.linear(x[:, ::2], weight.float()), x[:, ::2].double() @ weight.t()) < 1e-6
    with pytest.raises(RuntimeError):
        linear.linear(x, weight.float())
    with pytest.raises(RuntimeError):
        linear.linear(x[:, :32], weight.float(), None, Fusion(norm_kind="rms", norm_weight=torch.randn(31)))


@needs_compiler
@pytest.mark.parametrize(
    ("cache_dtype", "balanced"), [(torch.float32, False), (torch.bfloat16, False), (torch.int8, False), (torch.int8, True)]
)
@pytest.mark.parametrize(("dim", "size"), [(0, 48), (16, 48), (48, 48), (20, 21), (64, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store_equals_the_reference(
    normed: bool, interleaved: bool, dim: int, size: int, cache_dtype: torch.dtype, balanced: bool
) -> None:  # fmt: skip
    dtype = torch.float32 if cache_dtype == torch.int8 else cache_dtype
    scales = [torch.rand(2) * 0.02 + 0.01 if cache_dtype == torch.int8 else None for _ in range(2)]
    scales += [torch.rand(2, 2, size) + 0.5] if balanced else []
    caches = [KVCache(*(torch.full((5, 2, 4, size), 9).to(cache_dtype) for _ in range(2)), *scales) for _ in range(2)]
    heads = torch.randn(3, 4 + 2 + 2, size).to(dtype)
    q, k, v = heads.split((4, 2, 2), dim=1)
    positions, slots = torch.tensor([7, 0, 39], dtype=torch.int32), torch.tensor([9, -1, 19], dtype=torch.int32)
    table = torch.randn(40, dim) if dim else None
    norms = HeadNorms(torch.rand(size).to(dtype) + 0.5, torch.rand(size) + 0.5, 1e-5) if normed else None
    rotary = Rotary(positions, table, interleaved, norms)
    want = rope_reference.rope_store(q.clone(), k, v, rotary, caches[0], slots)
    before = k.clone(), v.clone()
    found = rope.rope_store(q, k, v, rotary, caches[1], slots)
    assert normed or found.data_ptr() == q.data_ptr()
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    torch.testing.assert_close(found, want)
    for name in ("keys", "values"):
        ours, theirs = (getattr(cache, name).float() for cache in caches)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.int8: 1.0}[cache_dtype]
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize(("position", "slot"), [(40, 0), (-1, 0), (0, 20)])
def test_positions_and_slots_out_of_range_raise_and_store_nothing(position: int, slot: int) -> None:
    cache = KVCache(torch.zeros(5, 2, 4, 16), torch.zeros(5, 2, 4, 16))
    q, k, v = torch.randn(1, 3 * 2, 16).split(2, dim=1)
    positions, slots = (torch.tensor([index], dtype=torch.int32) for index in (position, slot))
    with pytest.raises(IndexError):
        rope.rope_store(q, k, v, Rotary(positions, torch.randn(40, 16), False), cache, slots)
    assert not cache.keys.any()


TREES = {1: [-1, 0, 0, 1, 2, 2], 3: [-1, 0, 0]}
CASES = {
    "one": Case([(1, 1)]),
    "tiles": Case([(1, 127), (1, 128), (1, 129), (1, 300)], heads=6, kv_heads=2),
    "own keys": Case([(1, 40), (1, 5)], heads=3, kv_heads=3, size=32),
    "many queries": Case([(1, 70)], heads=9, kv_heads=1, size=16, value_size=48),
    "window": Case([(1, 200), (1, 20)], window=37),
    "chunk": Case([(1, 64), (1, 65), (1, 150)], chunk=64),
    "bfloat16": Case([(1, 33), (1, 140)], dtype=torch.bfloat16),
    "int8": Case([(1, 33), (1, 140)], cache_dtype=torch.int8),
    "tree": Case([(1, 37), (6, 130), (2, 40), (3, 20)], heads=6, kv_heads=2, trees=TREES),
    "tree, window": Case([(1, 97), (6, 133), (2, 140), (3, 120)], window=64, dtype=torch.bfloat16, trees=TREES),
    "tree, int8": Case([(1, 37), (6, 37), (2, 40), (3, 20)], cache_dtype=torch.int8, block_size=32, trees=TREES),
    "tree of 64 nodes": Case([(64, 190), (5, 9)], trees={0: [-1, *(i // 3 for i in range(63))]}),
    "level of a tree": Case([(2, 30), (2, 77)], trees={0: [-1, -1, 0, 0, 1], 1: [-1, -1, -1, 1, 1, 2]}),
}


def test_integer_products_without_vnni_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_reference, "has_integer_products", lambda: False)
    x, weight = torch.randint(-127, 128, (3, 5001), dtype=torch.int8), torch.randint(-128, 128, (7, 5001), dtype=torch.int8)
    x[0], weight[0] = 127, 127  # a sum of 80,661,129, which float32 has only rounded
    assert torch.equal(int8_reference._integer_product(x, weight), (x.long() @ weight.long().t()).float())


@needs_compiler
@kernel_only
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_of_single_queries(case: Case) -> None:
    q, cache, batch, params = case.build()
    found = attention.attention(q, cache, batch, params)
    assert found.dtype == q.dtype
    assert relative_error(found, expected_attention(q, cache, batch, params)) < TOLERANCE[case.dtype]


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "options"),
    [([1], {"softcap": 5.0}), ([1], {"alibi": True}), ([1], {"sinks": True}), ([1, 7], {}), ([1], {"size": 18})],
)
def test_attention_options_that_the_reference_computes(rows: list[int], options: dict) -> None:
    q, cache, batch, params = Case([(queries, 20) for queries in rows], **options).build()
    assert relative_error(attention.attention(q, cache, batch, params), expected_attention(q, cache, batch, params)) < 1e-5


@needs_compiler
def test_block_ids_out_of_range_raise() -> None:
    q, cache, batch, params = Case([(1, 40)]).build()
    batch.block_tables[0, 1] = 10**9
    with pytest.raises((IndexError, RuntimeError)):
        attention.attention(q, cache, batch, params)


@needs_compiler
def test_nan_scores_stay_in_their_head() -> None:
    q, cache, batch, _ = Case([(1, 150), (1, 10)]).build()
    q[0, 1, 3] = float("nan")
    found = attention.attention(q, cache, batch, AttentionParams(0.1)).view(2, 4, -1)
    assert found[0, 1].isnan().all() and found[0, [0, 2, 3]].isfinite().all() and found[1].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(96, 32), (100, 32), (270, 128), (576, 16)])
def test_rows_of_an_embedding_in_groups(columns: int, group: int, prepared: bool, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, ids = grouped_weight(50, columns, group, shifted), torch.tensor([49, 0, 7, 7, *range(20)], dtype=torch.int32)
    expected = {dtype: quant_int8.reference.packed_embedding(ids, weight, dtype) for dtype in (torch.float32, torch.bfloat16)}
    weight = quant_int8.prepare_weight(weight) if prepared else weight
    with pytest.raises(IndexError):
        quant_int8.packed_embedding(torch.tensor([50], dtype=torch.int32), weight, torch.float32)
    monkeypatch.setattr(quant_int8.reference, "packed_embedding", lambda *given: pytest.fail("the reference ran"))
    for dtype, want in expected.items():
        found = quant_int8.packed_embedding(ids, weight, dtype)
        torch.testing.assert_close(found, want, rtol=0 if not shifted else None, atol=0 if not shifted else None)
    assert quant_int8.packed_embedding(ids[:0], weight, torch.float32).shape == (0, columns)
