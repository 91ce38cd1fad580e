"""Run kernels on an emulated device. Cases: `fused_layer FORM`, `attention`, `prompts`, `prompt_blocks`, `outliers`, `rotation`,
`large_gemm`, `grouped_gemm`, `digits`, `fp4_experts`, `router`.

A process without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import test_rope_attention as attention
import torch
from emulated.launch import emulating
from fused_layer_cases import check, problem
from oracle import FP4_SCALES, TOLERANCE, Case, expected_attention, fp4_expert_of_every_scale, padded, relative_error
from test_attention import DRAFTED, test_draft_tokens_combine_by_flags, test_flags_of_results_whose_bits_are_all_zero
from test_rope import test_normalizes_heads_before_it_rotates_them, test_norms_before_an_8_bit_cache

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import moe as moe_reference
from stoker.kernels.reference import router as router_reference
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton import norm, rope
from stoker.kernels.triton.attention import launch as kernels
from stoker.kernels.triton.attention.tiles import AttentionTile, Splits
from stoker.kernels.triton.attention.warp_specialized import launch as prompts
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.requirements import first_weight
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.triton.gemm.large.launch import Digits, finished_counters, large_gemm
from stoker.kernels.triton.gemm.large.tiles import LargeGemmTile
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.gemm.quantized.int4 import prepare_weight
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.triton.moe import router
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import ClippedGate, FusedLayer, Fusion

Results = tuple[torch.Tensor, torch.Tensor | None]
# Features of the heads, of the residual stream, of the MLP, and of q, k and v: some end inside an iteration, some CTAs have no tile, and
# others have several.
SHAPE = (256, 512, 768, 320)
# rows, dtype, biases, last, gate, CTAs
SMALL_BATCH_CASES = [
    (1, torch.bfloat16, False, False, "silu", 35),
    (2, torch.float16, True, True, "gelu_tanh", 5),
    (3, torch.bfloat16, True, False, "silu", 4),
    (4, torch.bfloat16, False, True, "silu", 6),
    (5, torch.float16, True, False, "silu", 9),
    (8, torch.bfloat16, False, False, "gelu_tanh", 5),
]
LARGE_BATCH_CASES = [(6, torch.bfloat16, False, False, "silu", 4), (27, torch.bfloat16, True, False, "gelu_tanh", 7)]  # int4


def run(x: torch.Tensor, stream: torch.Tensor, parts: FusedLayer, num_ctas: int, seed: int) -> Results:
    with emulating(seed, num_ctas) as conflicts:
        tile = small_batch.measured_tile(first_weight(parts))
        launch = small_batch.run_small_batch if tile and len(x) <= tile.max_tokens else large_batch.run_large_batch
        results = launch(x, stream, parts)
    assert not any(count for name, count in conflicts.items() if ".v2" in name or ".v4" in name), f"bank conflicts: {conflicts}"
    return results


def fused_layer(form: str) -> None:
    weights_dtype = {"dense": "bfloat16", "bytes": "int8"}.get(form.split()[0], form.split()[0])
    max_tokens = tuning_for("NVIDIA H200", 90).tile("fused_layer_small_batch", weights_dtype).max_tokens
    cases = [case for case in SMALL_BATCH_CASES if case[0] <= max_tokens]
    if form.startswith("int4"):
        cases = [SMALL_BATCH_CASES[0], SMALL_BATCH_CASES[max_tokens - 1], LARGE_BATCH_CASES[form.endswith("32")]]
    for rows, dtype, biases, last, gate, num_ctas in cases:
        parts, weights = problem(form, SHAPE, dtype, biases, last, gate, "cpu")
        x, stream = torch.randn(rows, SHAPE[0]).to(dtype), torch.randn(rows, SHAPE[1]).to(dtype)
        x[0, 3] *= 20
        results = run(x, stream, parts, num_ctas, rows)
        check(form, results, x, stream, parts, weights)
        if rows == max_tokens:
            check_last_row_alone(results, x, stream, parts, num_ctas)
        if rows in (max_tokens, LARGE_BATCH_CASES[0][0]):
            check_nan_stays_in_its_row(results, x, stream, parts, num_ctas)


def check_last_row_alone(results: Results, x: torch.Tensor, stream: torch.Tensor, parts: FusedLayer, num_ctas: int) -> None:
    """A row does not depend on the other rows, nor on the number of CTAs."""
    last = slice(len(x) - 1, len(x))
    for batch, alone in zip(results, run(x[last], stream[last], parts, num_ctas + 1, 1), strict=True):
        assert batch is None or (alone is not None and torch.equal(batch[last], alone))


def check_nan_stays_in_its_row(results: Results, x: torch.Tensor, stream: torch.Tensor, parts: FusedLayer, num_ctas: int) -> None:
    """The other rows equal those of the launch before, which must have left its flags and counters at zero."""
    x[0, 7] = float("nan")
    for before, after in zip(results, run(x, stream, parts, num_ctas, 0), strict=True):
        assert before is None or (after is not None and after[0].isnan().all() and torch.equal(before[1:], after[1:]))


def attend() -> None:
    """Decode rows with new tokens, and rows with draft tokens. Splits combine by flags, with CTAs in any order, or by a counter."""
    half, wide = (
        Case([(1, 90), (1, 1), (1, 40), (1, 33)], block_size=32, dtype=torch.bfloat16),
        Case([(1, 70)], size=128, dtype=torch.float16),
    )
    for case, dim, splits, num_ctas in (
        (half, 64, Splits(3), 132), (half, 64, Splits(8, 2), 132), (half, 64, Splits(4), 8), (wide, 128, Splits(4), 132),
        (half, 64, Splits(4, by_lengths=True), 8),
    ):  # fmt: skip
        with emulating(case.size, num_ctas):
            attention.check(case, dim, False, AttentionTile(16, 16, 4, 2), splits)
    for case, dim in ((half, 64), (wide, 64)):
        with emulating(case.size):
            attention.check(case, dim, False, AttentionTile(16, 16, 4, 2), Splits(4), norms=attention.norms(case.size))
    with emulating():
        test_flags_of_results_whose_bits_are_all_zero()
        test_draft_tokens_combine_by_flags(*DRAFTED["chains"])
    for case in (Case([(1, 40), (1, 9)], dtype=torch.bfloat16), Case([(3, 40), (2, 9)], dtype=torch.bfloat16)):
        attend_captured(case)
    pairs: dict[str, Any] = {"kv_heads": 1, "block_size": 64, "dtype": torch.bfloat16}
    for cache_dtype, mean, size, tile in (
        (torch.float8_e4m3fn, False, 128, AttentionTile(16, 64, 4, 3)),
        (torch.float8_e4m3fn, True, 64, AttentionTile(16, 64, 2, 3)),
        (torch.int8, False, 64, AttentionTile(16, 32, 1, 3)),
    ):
        attend_pairs(Case([(1, 150), (1, 1), (1, 70)], cache_dtype=cache_dtype, mean=mean, size=size, **pairs), tile)
    for seed, (name, splits) in enumerate(
        (("half of Llama-3.1-70B", Splits(2)), ("half of a head, interleaved", Splits(1)), ("int8, two rows, normed", Splits(2)))
    ):
        attend_new_8_bit_tokens(attention.new_8_bit_tokens(*attention.CASES_8_BIT[name]), splits, seed)


def attend_pairs(case: Case, tile: AttentionTile) -> None:
    """Decode rows over an 8-bit cache, whose pairs of features are unpacked by inline PTX as on a GPU."""
    q, cache, batch, params = case.build()
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    operand_format = kernels._operand_format
    with (
        mock.patch.object(kernels, "_operand_format", lambda q, pairs: operand_format(q, pairs)._replace(packed=True)),
        emulating(case.size),
    ):
        kernels.decode(q, cache, batch, params, out, tile, Splits(1))
    assert relative_error(out.flatten(1), expected_attention(q, cache, batch, params)) < TOLERANCE[case.dtype]


def attend_new_8_bit_tokens(arguments: tuple[Any, ...], splits: Splits, seed: int) -> None:
    """One launch that rotates, stores and attends stores the bytes of two launches.

    Both are compiled for themselves and may combine splits in another order, which rounds a few results to the next value.
    """
    operand_format = kernels._operand_format
    with (
        mock.patch.object(kernels, "_operand_format", lambda q, pairs: operand_format(q, pairs)._replace(packed=True)),
        emulating(seed),
    ):
        attention.check_8_bit(arguments, AttentionTile(16, 64, 4, 3), splits, 1e-3)


def rotate() -> None:
    """Queries that are normalized and rotated in place, although warps are delayed, and keys that are stored in 16 and 8 bits."""
    for heads, kv_heads, size, dim, interleaved in ((8, 2, 128, 128, False), (5, 1, 20, 10, True), (16, 2, 256, 64, False)):
        with emulating():
            test_normalizes_heads_before_it_rotates_them(rope, heads, kv_heads, size, dim, torch.bfloat16, interleaved, torch.float32)
    for tokens in (3, 70):
        with emulating():
            test_norms_before_an_8_bit_cache(128, 128, True, True, torch.float8_e4m3fn, tokens)


def attend_captured(case: Case) -> None:
    """A captured step in which one of both launches has no rows, after the launch that stores the queries and before one that reads all."""
    q, cache, batch, params = case.build()
    weight, tile, splits = torch.ones(q[0].numel(), dtype=q.dtype), AttentionTile(16, 16, 4, 2), Splits(2)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    with emulating(0, num_ctas=8):
        queries = norm.norm(q.flatten(1), weight, None, 1e-5, "rms").view(q.shape)
        for launch in (kernels.decode, kernels.prefill):
            launch(queries, cache, padded(batch, 3), params, out, tile, splits)
        got = norm.norm(out.flatten(1), weight, None, 1e-5, "rms")
    want = expected_attention(queries, cache, batch, params)
    assert relative_error(got, want * (want.square().mean(1, keepdim=True) + 1e-5).rsqrt()) < TOLERANCE[case.dtype]


def attend_prompts() -> None:
    """Prompts by the warp-specialized kernel: over keys less one to three means, and in windows whose first block begins inside a tile."""
    means: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "mean": True}
    for seed, case in enumerate(
        (
            Case([(1, 12), (20, 1100), (2, 1025), (3, 2100), (3, 3)], kv_heads=1, dtype=torch.bfloat16, block_size=32, **means),
            Case([(1, 12), (33, 1040), (3, 1026)], heads=3, kv_heads=1, size=128, dtype=torch.bfloat16, block_size=64, sinks=True, **means),
            Case([(1, 12), (20, 300), (9, 1100)], kv_heads=1, dtype=torch.float16, window=200, **means),
            Case([(1, 12), (40, 300), (33, 33)], kv_heads=1, dtype=torch.bfloat16, window=40),
            Case([(1, 12), (70, 200)], heads=2, kv_heads=1, size=128, dtype=torch.float16, block_size=64, sinks=True),
        )
    ):
        attend_prompts_of(case, seed)


def attend_blocks() -> None:
    """Prompts by the warp-specialized kernel over blocks of one and of eight bulk copies per key tile, whose last slots are NaN."""
    windowed = {"heads": 2, "kv_heads": 1, "size": 128, "dtype": torch.bfloat16, "window": 100}
    attend_prompts_of(Case([(1, 12), (20, 150)], block_size=128, **windowed), 0)  # type: ignore[arg-type]
    attend_prompts_of(Case([(1, 12), (40, 300), (9, 40)], heads=3, kv_heads=1, size=128, dtype=torch.bfloat16), 1)


def attend_prompts_of(case: Case, seed: int) -> None:
    """A step, and the same step with padding, whose numbers of rows are on the device."""
    q, cache, batch, params = case.build()
    out = torch.full((len(q), case.heads, case.size), float("nan"), dtype=case.dtype)
    with emulating(seed, num_ctas=3):
        prompts.warp_specialized_prefill(q, cache, batch, params, out)
    assert not prompts.tile_counter(q.device).any()
    assert out[: batch.num_decodes].isnan().all()
    got, want = out[batch.num_decodes :].flatten(1), expected_attention(q, cache, batch, params)[batch.num_decodes :]
    assert relative_error(got, want) < TOLERANCE[case.dtype], case
    found = torch.full_like(out, float("nan"))
    with emulating(seed, num_ctas=3):
        prompts.warp_specialized_prefill(q, cache, padded(batch, 5), params, found)
    assert not prompts.tile_counter(q.device).any()
    assert torch.equal(found.nan_to_num(9.0), out.nan_to_num(9.0)), case


def attend_outliers() -> None:
    """Prompts over e4m3 keys less a mean, for two sizes of heads and of blocks."""
    shared: dict[str, Any] = {"kv_heads": 1, "dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn, "mean": True}
    attend_outliers_of(Case([(70, 300)], heads=3, size=128, block_size=64, **shared))
    attend_outliers_of(Case([(70, 300)], **shared))


def attend_outliers_of(case: Case) -> None:
    """Queries of very different magnitudes, with features 100 times as large as the others, or zero. One NaN stays in its row."""
    q, cache, batch, params = case.build()
    q[:, :, 5] *= 100
    q *= torch.logspace(-3, 1, len(q), dtype=q.dtype)[:, None, None]
    q[7] = 0
    params = replace(params, scale=params.scale / 30)
    out = torch.full((len(q), case.heads, case.size), float("nan"), dtype=case.dtype)
    with emulating(0, num_ctas=2):
        prompts.warp_specialized_prefill(q, cache, batch, params, out)
    want = expected_attention(q, cache, batch, params)
    assert relative_error(out.flatten(1), want) < TOLERANCE[case.dtype], case
    q[3, 0, 9] = float("nan")
    found = torch.full_like(out, float("nan"))
    with emulating(1, num_ctas=2):
        prompts.warp_specialized_prefill(q, cache, batch, params, found)
    assert found[3, 0].isnan().all()
    found[3, 0] = out[3, 0]
    assert torch.equal(found, out), case


# rows, outputs, features, dtype, tile, bias, gate and residual, CTAs: rows, outputs and features end inside a tile, and CTAs have several
# units, or no unit. Slices have equal numbers of blocks, or not.
NARROW_TILE, WIDE_TILE = LargeGemmTile(128, 128, 2, 16), LargeGemmTile(128, 256, 2, 1)
SPLIT_TILE, TALL_TILE = NARROW_TILE._replace(max_slices=8), LargeGemmTile(192, 128, 2, 16)
SMALL_TILE = LargeGemmTile(64, 128, 3, 16)
LARGE_GEMM_CASES = [
    (50, 392, 592, torch.bfloat16, SMALL_TILE._replace(max_slices=4), "br", 11),
    (90, 264, 200, torch.bfloat16, SMALL_TILE, "g", 3),
    (230, 264, 592, torch.bfloat16, TALL_TILE._replace(max_slices=8), "br", 5),
    (130, 328, 336, torch.float16, WIDE_TILE._replace(max_slices=3), "bgr", 5),
    (150, 200, 592, torch.float8_e4m3fn, SPLIT_TILE, "br", 5),
    (130, 72, 336, torch.float8_e4m3fn, SPLIT_TILE, "bgr", 13),
    (70, 264, 200, torch.float8_e4m3fn, SPLIT_TILE, "", 3),
    (150, 200, 304, torch.float8_e4m3fn, NARROW_TILE, "r", 3),
    (130, 144, 240, torch.float8_e4m3fn, WIDE_TILE, "g", 2),
    (230, 200, 304, torch.float8_e4m3fn, TALL_TILE, "r", 3),
    (100, 136, 176, torch.bfloat16, TALL_TILE, "b", 1),
    (40, 136, 104, torch.float16, NARROW_TILE, "", 4),
    (70, 144, 120, torch.bfloat16, WIDE_TILE, "bgr", 2),
]


def multiply() -> None:
    """The GEMM for many rows. FP8 rows are quantized by the launch before it."""
    for rows, n, k, dtype, tile, parts, num_ctas in LARGE_GEMM_CASES:
        kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
        source, weight = torch.randn(rows, k).to(kind), torch.randn(2 * n if "g" in parts else n, k).to(kind)
        bias = torch.randn(len(weight)).to(kind) if "b" in parts else None
        residual = torch.randn(rows, n).to(kind) if "r" in parts else None
        gate = "silu" if "g" in parts else None
        outputs = []
        for seed in range(2):
            with emulating(seed, num_ctas + (seed if tile.max_slices == 1 else 0)):  # the slices depend on the number of CTAs
                w, weight_scale, wide_weight = _operand(weight, dtype)  # not by the launch before the GEMM, which does not wait to load it
                x, x_scale, wide_x = _operand(source, dtype)
                out = large_gemm(x, w, tile, x_scale=x_scale, weight_scale=weight_scale, bias=bias, residual=residual, gate=gate)
            outputs.append(out)
        assert not finished_counters(outputs[0].device).any(), "counters are not zero"
        fusion = Fusion(gate=gate, residual=None if residual is None else residual.double())
        want = linear_reference.linear(wide_x, wide_weight, None if bias is None else bias.double(), fusion)
        assert relative_error(outputs[0], want) < TOLERANCE[kind], (rows, n, k, dtype, tile)
        assert torch.equal(*outputs), "the result depends on the order of CTAs"


# rows of each expert, outputs, features, dtype, tile, bias and gate, CTAs: experts without rows, with one row, with fewer than a tile or a
# consumer has, with as many, and with more. Tiles at the end of a weight read rows of the next one.
GROUPED_CASES = [
    ([0, 1, 130, 0, 64, 128, 40, 0], 200, 304, torch.float8_e4m3fn, NARROW_TILE, "", 3),
    ([0, 0, 150, 0], 136, 240, torch.float8_e4m3fn, NARROW_TILE, "b", 5),
    ([70, 129, 3], 264, 272, torch.float8_e4m3fn, WIDE_TILE, "", 2),
    ([5, 140, 100], 136, 176, torch.float8_e4m3fn, WIDE_TILE, "bg", 4),
    ([191, 0, 193, 66], 136, 176, torch.float8_e4m3fn, TALL_TILE, "", 3),
    ([3, 0, 131], 136, 88, torch.bfloat16, WIDE_TILE, "b", 3),
]


def multiply_experts() -> None:
    """The grouped GEMM. A row has the bits of a product with the weight of its expert alone."""
    for counts, n, k, dtype, tile, parts, num_ctas in GROUPED_CASES:
        offsets, experts, gate = torch.tensor([0, *counts]).cumsum(0).int(), len(counts), "silu" if "g" in parts else None
        source, weights = torch.randn(sum(counts), k).bfloat16(), torch.randn(experts * (2 * n if gate else n), k).bfloat16()
        bias = torch.randn(experts, len(weights) // experts).bfloat16() if "b" in parts else None
        outputs = []
        for seed in range(2):
            with emulating(seed, num_ctas + seed):
                x, x_scale, wide_x = _operand(source, dtype)
                w, weight_scale, wide_weight = _operand(weights, dtype)
                w, scales = w.unflatten(0, (experts, -1)), {}
                if weight_scale is not None:
                    weight_scale = weight_scale.unflatten(0, (experts, -1))
                    scales = {"x_scale": x_scale, "weight_scale": weight_scale}
                outputs.append(large_gemm(x, w, tile, **scales, bias=bias, gate=gate, offsets=offsets))
        for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
            if begin == end:
                continue
            added = None if bias is None else bias[expert].double()
            want = linear_reference.linear(wide_x[begin:end], wide_weight.unflatten(0, (experts, -1))[expert], added, Fusion(gate=gate))
            assert relative_error(outputs[0][begin:end], want) < TOLERANCE[torch.bfloat16], (counts, tile, expert)
        last = max(expert for expert, count in enumerate(counts) if count)
        begin, end = offsets[last : last + 2].tolist()
        with emulating(0, num_ctas):
            if x_scale is not None and weight_scale is not None:
                scales = {"x_scale": x_scale[begin:end].clone(), "weight_scale": weight_scale[last].clone()}
            added = None if bias is None else bias[last].clone()
            alone = large_gemm(x[begin:end].clone(), w[last].clone(), tile, **scales, bias=added, gate=gate)
        assert torch.equal(outputs[0][begin:end], alone), "a row depends on other rows"
        assert torch.equal(*outputs), "the result depends on the order of CTAs"


# rows, outputs, features, dtype, tile, whether there is a bias, CTAs. The last slab of rows is whole or not.
DIGIT_CASES = [
    (75, 200, 304, torch.bfloat16, WIDE_TILE, True, 3),
    (140, 136, 144, torch.float16, NARROW_TILE, False, 2),
    (9, 264, 256, torch.bfloat16, WIDE_TILE, False, 5),
]


def multiply_digits() -> None:
    """Rows as int8 digits × int8 weights, whose sums are exact, with digits of random magnitudes."""
    for rows, n, k, dtype, tile, is_biased, num_ctas in DIGIT_CASES:
        source = (torch.randn(rows, k) * torch.logspace(-3, 0, rows)[:, None]).to(dtype)
        weight, weight_scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) + 0.1
        bias = torch.randn(n).to(dtype) if is_biased else None
        outputs = []
        for seed in range(2):
            with emulating(seed, num_ctas + seed):
                x = quantize_rows(source, "slabs", k)
                scales = {"x_scale": x.scale, "weight_scale": weight_scale}
                outputs.append(large_gemm(x.values, weight, tile, **scales, bias=bias, digits=Digits(rows, dtype)))
        coarse, fine = x.values.double().unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(1, 2)[:, :rows]
        want = (254 * coarse + fine) @ weight.double().t() * x.scale.double()[:, None] * weight_scale.double()
        want = want if bias is None else want + bias.double()
        assert outputs[0].dtype == dtype and relative_error(outputs[0], want) < 4e-3, (rows, n, k, tile)
        exact = source.double() @ (weight.double() * weight_scale.double()[:, None]).t()
        assert relative_error(want - (0 if bias is None else bias.double()), exact) < 1e-4, "digits in other rows"
        assert torch.equal(*outputs), "the result depends on the order of CTAs"


def _operand(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(values, scale of each row or None, real values in float64). Beyond the features, values are NaN."""
    k, padded = x.shape[1], x.shape[1] // 16 * 16 + 32
    if dtype != torch.float8_e4m3fn:
        values = torch.full((len(x), padded), torch.nan, dtype=dtype)
        values[:, :k] = x
        return values[:, :k], None, x.double()
    quantized = quantize_rows(x, "fp8", padded)
    values, scale = quantized.values, quantized.scale
    values.view(torch.int8)[:, k:] = 127
    return values[:, :k], scale, values[:, :k].double() * scale[:, None].double()


# Tokens of a tile, tile, dtype, features of a group, rows of the weight, input features: the last tile, the last iteration and the last
# chunk are not full, or all are.
EXPERT_CASES = [
    (16, QuantTile(128, 128, 2, 4, 4), torch.bfloat16, 32, 130, 290),
    (8, QuantTile(128, 64, 1, 4, 3), torch.bfloat16, 16, 128, 192),
    (32, QuantTile(256, 192, 1, 8, 2), torch.bfloat16, 128, 144, 384),
    (16, QuantTile(128, 128, 1, 4, 4), torch.float16, 16, 66, 256),
]


def fence_copies(name: str, ptx: str) -> str:
    """The PTX with a fence before each barrier: Triton's pipelines have none between cp.async and matrix instructions."""
    return ptx.replace("bar.sync", "fence.proxy.async.shared::cta;\n\tbar.sync")


def project_experts() -> None:
    """FP4 experts in the layout `quads`, with all values and scales of powers of two between 2 ** -9 and 2, and rows of other ranks."""
    top_k, counts = 2, [0, 21, 0, 5]
    order = torch.randperm(sum(counts) + 4).int()
    routing = Routing(torch.rand(len(order) // top_k, top_k), order, torch.tensor([0, *counts]).cumsum(0).int() + 1, is_whole=False)
    for tokens, tile, dtype, group, n, k in EXPERT_CASES:
        shape = (len(counts), n, -(-k // group))
        stored = PackedWeight(
            "int4",
            torch.randint(0, 256, (*shape[:2], k // 2), dtype=torch.uint8),
            torch.randint(-9, 2, shape).float().exp2().bfloat16(),
            None,
            group,
            bias=torch.randn(shape[:2]).to(dtype),
            is_fp4=True,
            row_scale=torch.rand(shape[:2]) + 0.5 if group == 16 else None,
        )
        weight = prepare_weight(stored)
        assert weight.layout == "quads"
        x, choices = torch.randn(len(order) // top_k, k).to(dtype), torch.randn(len(order), k).to(dtype)
        with emulating(len(x), num_ctas=5, edit_ptx=fence_copies):
            up = moe.expert_up(x, weight, routing, tile=tile, tokens=tokens)
            gated = [moe.expert_up(x, weight, routing, gate, tile, tokens) for gate in ("silu", ClippedGate(7.0, 1.702))]
            down = moe.expert_down(choices, weight, routing, tile=tile, tokens=tokens)
        dense = PackedWeight("dense", dequantize_int4(stored, torch.float64), bias=stored.bias.double())
        assert relative_error(up, moe_reference.expert_up(x.double(), dense, routing)) < TOLERANCE[dtype], tile
        assert relative_error(down, moe_reference.expert_down(choices.double(), dense, routing)) < TOLERANCE[dtype], tile
        gate, values = moe_reference.expert_up(x.double(), dense, routing).chunk(2, -1)
        clipped = gate.clamp(max=7.0)
        assert relative_error(gated[0], gate / (1 + torch.exp(-gate)) * values) < TOLERANCE[dtype], tile
        assert relative_error(gated[1], (values.clamp(-7.0, 7.0) + 1) * clipped / (1 + torch.exp(-1.702 * clipped))) < TOLERANCE[dtype], (
            tile
        )
    for scale in FP4_SCALES:
        stored, real = fp4_expert_of_every_scale(scale)
        x, routing = torch.eye(64).bfloat16(), Routing(torch.ones(64, 1), torch.arange(64).int(), torch.tensor([0, 64]).int())
        weight = prepare_weight(stored)
        with emulating(num_ctas=2, edit_ptx=fence_copies):
            up = moe.expert_up(x, weight, routing)
        assert torch.equal(up.double(), real[0].T), scale


def route_many_tokens() -> None:
    """With one slice of the features and several, experts in one CTA and in several, and small and large tiles."""
    for tokens, experts, features, params, sms in (
        (66, 20, 520, RoutingParams(3, "softmax_topk"), 12), (65, 8, 264, RoutingParams(2), 1), (67, 72, 72, RoutingParams(4), 3),
        (130, 72, 40, RoutingParams(2), 3),
    ):  # fmt: skip
        x, weight = torch.randn(tokens, features).bfloat16(), torch.randn(experts, features) * features**-0.5
        bias, norm_weight = torch.randn(experts), torch.rand(features).bfloat16() + 0.5
        x[5] = x[6]
        x[40, 3] = float("nan")
        with emulating(tokens, num_ctas=sms):
            assert router.uses_router_product(x, weight, params)
            y, routing = router.route_tokens(x, weight, bias, None, params, Fusion("rms", norm_weight, None, 1e-5))
        wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm_weight.double()
        is_number = torch.arange(tokens) != 40
        assert relative_error(y[is_number], wide[is_number]) < TOLERANCE[torch.bfloat16] and y[40].isnan().all()
        want = router_reference.route(y.double() @ weight.double().T + bias, None, params)
        assert routing.weights[40].isnan().all()
        assert torch.allclose(routing.weights[is_number], want.weights[is_number].float(), rtol=1e-4, atol=1e-6)
        chosen, wanted = experts_of_choices(routing), experts_of_choices(want)
        assert torch.equal(chosen[is_number], wanted[is_number]) and len(set(chosen[40].tolist())) == params.top_k
        parts = routing.order.split(routing.offsets.diff().tolist())
        assert all(bool((part.diff() > 0).all()) for part in parts) and routing.offsets[-1] == tokens * params.top_k


def experts_of_choices(routing: Routing) -> torch.Tensor:
    """[T, k]"""
    experts = torch.repeat_interleave(torch.arange(len(routing.offsets) - 1), routing.offsets.diff().long())
    return torch.empty_like(experts).index_copy_(0, routing.order.long(), experts).view(routing.weights.shape)


if __name__ == "__main__":
    torch.manual_seed(0)
    {
        "attention": attend, "prompts": attend_prompts, "prompt_blocks": attend_blocks, "outliers": attend_outliers, "rotation": rotate,
        "large_gemm": multiply, "grouped_gemm": multiply_experts, "digits": multiply_digits, "fp4_experts": project_experts,
        "router": route_many_tokens,
        "fused_layer": lambda: fused_layer(sys.argv[2]),
    }[sys.argv[1]]()  # fmt: skip
