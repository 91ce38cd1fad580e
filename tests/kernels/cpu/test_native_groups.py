"""The C kernels of the CPU for weights in groups of features, as they are stored and in blocks, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_cases import DIGITS_TOLERANCE, TOLERANCE, check, fp4, grouped, grouped_weight, int4, int4_weight, kernel_only, needs_compiler
from oracle import relative_error
from torch import Tensor

from stoker.kernels.native import library, linear, quant_int4, quant_int8
from stoker.kernels.reference import quant_int4 as int4_reference
from stoker.kernels.reference import quant_int8 as int8_reference
from stoker.kernels.types import PLAIN


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
