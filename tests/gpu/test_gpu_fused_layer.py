"""The fused layer kernels against float64, and for FP8 against one linear after another.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import fused_layer_cases as cases
import pytest
import torch
from fused_layer_cases import BOUND, FORMS, check, errors, in_float64

from stoker.kernels.types import PLAIN, FusedLinear
from stoker.quant.linear_ops import PackedLinear

# (heads' features, hidden, MLP's, qkv): CTAs without a tile, features that end inside an iteration, several tiles per CTA, Llama-3.1-8B
SHAPES = [(256, 512, 768, 320), (1280, 1024, 2816, 1536), (2048, 2560, 6912, 3072), (4096, 4096, 14336, 6144)]
LLAMA_70B = (8192, 8192, 28672, 10240)  # two stages for four rows of FP8; no int8 or int4 of three rows
problem = partial(cases.problem, device="cuda")


# Two formats of the largest shape: a case needs 8 GiB of device memory for its float32 reference, and cases run in parallel.
CASES = [*itertools.product(FORMS, SHAPES), ("fp8", LLAMA_70B), ("int4 none", LLAMA_70B)]


@pytest.mark.parametrize(("form", "shape"), CASES, ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)))
def test_the_small_batch_kernel_equals_its_linears(form: str, shape: tuple[int, ...]) -> None:
    from stoker.kernels.triton.fused_layer import launch as launcher
    from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch

    torch.manual_seed(0)
    for rows, dtype, biases, last, gate in (
        (1, torch.bfloat16, False, False, "silu"),
        (1, torch.float16, True, True, "gelu_tanh"),
        (2, torch.bfloat16, True, True, "gelu_tanh"),
        (3, torch.float16, False, False, "silu"),
        (4, torch.bfloat16, False, False, "silu"),
        (5, torch.bfloat16, True, False, "silu"),
        (8, torch.float16, False, True, "silu"),
    ):
        parts, weights = problem(form, shape, dtype, biases, last, gate)
        max_tokens = small_batch.measured_tile(parts.out.weight).max_tokens
        is_small = small_batch.supports_small_batch(parts, rows)
        assert not is_small if rows > max_tokens else is_small or rows > 4 or shape == LLAMA_70B  # the others have no shared memory left
        assert launcher.supports_fused_layer(parts, rows) == (is_small or (form.startswith("int4") and dtype == torch.bfloat16))
        if not is_small:
            continue
        x, stream = torch.randn(rows, shape[0]).to(dtype).cuda(), torch.randn(rows, shape[1]).to(dtype).cuda()
        x[0, 3] *= 20
        torch.full((1 << 22,), float("nan"), device="cuda")  # the next allocations hold these values
        results = small_batch.run_small_batch(x, stream, parts)
        for row in range(rows):  # a row does not depend on the others
            alone = small_batch.run_small_batch(x[row : row + 1], stream[row : row + 1], parts)
            assert all(one is other or torch.equal(one[0], other[row]) for one, other in zip(alone, results, strict=True))
        check(form, results, x, stream, parts, weights)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kind", ["none 128", "int 128", "float 128", "int 64", "none 32", "float 32"])
def test_the_large_batch_kernel_equals_its_linears(kind: str, shape: tuple[int, ...]) -> None:
    """Also for numbers of rows that do not fill a tile. A row does not depend on the others."""
    from stoker.kernels.triton.fused_layer import launch as launcher

    torch.manual_seed(0)
    for rows, biases, last, gate in (
        (3, False, False, "silu"),
        (6, False, False, "silu"),
        (16, True, False, "silu"),
        (27, True, True, "gelu_tanh"),
        (64, False, False, "silu"),
    ):
        parts, weights = problem(f"int4 {kind}", shape, torch.bfloat16, biases, last, gate)
        assert launcher.supports_fused_layer(parts, rows)
        x, stream = torch.randn(rows, shape[0]).bfloat16().cuda(), torch.randn(rows, shape[1]).bfloat16().cuda()
        x[0, 3] *= 20
        torch.full((1 << 24,), float("nan"), device="cuda")  # the next allocations hold these values
        results = launcher.fused_layer(x, stream, parts)
        assert max(errors(results, in_float64(x, stream, parts, weights))) < BOUND
        order = torch.randperm(rows)
        order[rows // 2] = rows // 2
        permuted = launcher.fused_layer(x[order].contiguous(), stream[order].contiguous(), parts)
        for one, other in zip(results, permuted, strict=True):
            assert one is None or torch.equal(one[order], other)


def test_unsupported_numbers_of_rows_and_dtypes() -> None:
    from stoker.kernels.triton.fused_layer import launch as launcher

    parts, small = (problem(f"int4 int {group}", SHAPES[0], torch.bfloat16, False, False, "silu")[0] for group in (128, 32))
    halves, _ = problem("int4 int", SHAPES[0], torch.float16, False, False, "silu")
    codes, _ = problem("bytes", SHAPES[0], torch.bfloat16, False, False, "silu")
    ragged, _ = problem("int4 int", (256, 384, 768, 320), torch.bfloat16, False, False, "silu")
    assert [rows for rows in (1, 2, 4, 5, 33, 64, 65) if launcher.supports_fused_layer(parts, rows)] == [1, 2, 4, 5, 33, 64]
    assert [rows for rows in (1, 2, 4, 5, 33, 64, 65) if launcher.supports_fused_layer(small, rows)] == [1, 2, 4, 5, 33, 64]
    assert not any(launcher.supports_fused_layer(other, 32) for other in (halves, codes, ragged))


@pytest.mark.parametrize(
    ("form", "rows"), [("fp8", 1), ("dense", 3), ("int4 int", 1), ("int4 none 32", 2), ("int4 int", 27), ("int4 float 32", 27)]
)
def test_the_grid_barrier_works_in_every_replay(form: str, rows: int) -> None:
    """Every launch leaves the counters of its barriers at zero: 200 replays of 8 launches give the results of the first launch."""
    from stoker.kernels.triton.fused_layer import launch as launcher

    torch.manual_seed(1)
    parts, _ = problem(form, SHAPES[1], torch.bfloat16, False, False, "silu")
    x, stream = torch.randn(rows, 1280).bfloat16().cuda(), torch.randn(rows, 1024).bfloat16().cuda()
    first = launcher.fused_layer(x, stream, parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated = [launcher.fused_layer(x, stream, parts) for _ in range(8)]
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    for after, qkv in repeated:
        assert torch.equal(after, first[0])
        assert torch.equal(qkv, first[1])


@pytest.mark.parametrize(
    ("form", "rows"), [("bytes", 1), ("dense", 4), ("fp8", 3), ("int4 int", 2), ("int4 float 64", 3), ("int4 int", 12)]
)
def test_nan_stays_in_its_row(form: str, rows: int) -> None:
    from stoker.kernels.triton.fused_layer import launch as launcher

    parts, _ = problem(form, SHAPES[0], torch.bfloat16, False, False, "silu")
    x, stream = torch.randn(rows, 256).bfloat16().cuda(), torch.randn(rows, 512).bfloat16().cuda()
    x[0, 7] = float("nan")
    for result in launcher.fused_layer(x, stream, parts):
        assert result[0].isnan().all()
        assert not result[1:].isnan().any()


def test_unsupported_weights() -> None:
    from stoker.kernels.triton.fused_layer import launch as launcher

    parts, _ = problem("bytes", SHAPES[0], torch.bfloat16, False, False, "silu")
    other, _ = problem("int4 int", SHAPES[0], torch.bfloat16, False, False, "silu")
    odd, _ = cases.linear("bytes", 500, 256, False, torch.bfloat16, "cuda")
    assert not launcher.supports_fused_layer(replace(parts, up=other.up), 1)
    assert not launcher.supports_fused_layer(replace(parts, out=FusedLinear(PackedLinear(odd), odd, PLAIN)), 1)
    assert not launcher.supports_fused_layer(replace(parts, up=replace(parts.up, fusion=replace(parts.up.fusion, norm_kind="layer"))), 1)
    assert not launcher.supports_fused_layer(replace(parts, down=replace(parts.down, weight=None)), 1)
