"""The C kernels of the CPU against float64 and against the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_cases import (
    TOLERANCE,
    check,
    dense,
    expected,
    fp4,
    grouped,
    grouped_weight,
    int4,
    int4_weight,
    int8,
    kernel_only,
    needs_compiler,
)
from oracle import Case, expected_attention, relative_error

from stoker.core.forward_batch import KVCache
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native import attention, fused_layer, linear, quant_fp8, quant_int4, quant_int8, rope
from stoker.kernels.reference import activation as activation_reference
from stoker.kernels.reference import fused_layer as fused_layer_reference
from stoker.kernels.reference import quant_int8 as int8_reference
from stoker.kernels.reference import rope as rope_reference
from stoker.kernels.types import PLAIN, AttentionParams, FusedLayer, FusedLinear, Fusion, HeadNorms, Rotary


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
