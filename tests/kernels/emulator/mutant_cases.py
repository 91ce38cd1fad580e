"""Small launches of kernels on the emulated device, checked as in `emulate.py`, with edited PTX."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import test_rope_attention as attention
import torch
from emulated.launch import emulating
from fused_layer_cases import check, linear, problem
from oracle import TOLERANCE, Case, relative_error

from stoker.kernels.triton import norm
from stoker.kernels.triton.attention import launch as kernels
from stoker.kernels.triton.attention.tiles import AttentionTile, Splits
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.triton.gemm.large import launch as large_gemm
from stoker.kernels.triton.gemm.large.tiles import LargeGemmTile
from stoker.kernels.triton.gemm.quantized import int4
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

# Allocated once for all launches.
SCRATCH = (small_batch.barrier_counter, kernels._finished_counters, kernels._flag_words, large_gemm.finished_counters)
Edit = Callable[[str, str], str]
NUM_CTAS = 3


def large(edit: Edit) -> None:
    _fused_layer(edit, 6, large_batch.run_large_batch)


def small(edit: Edit) -> None:
    _fused_layer(edit, 2, small_batch.run_small_batch)


def _fused_layer(edit: Edit, tokens: int, run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """The last layer of a model, after a launch of a norm that stores its input."""
    torch.manual_seed(tokens)
    layer, weights = problem("int4 int", (256, 256, 256, 256), torch.bfloat16, False, True, "silu", "cpu")
    x, residual = torch.randn(tokens, 256).bfloat16(), torch.randn(tokens, 256).bfloat16()
    partials: list[torch.Tensor] = []

    def new_partials(device: torch.device, count: int) -> torch.Tensor:
        partials.append(torch.zeros(count))
        return partials[-1]

    with emulating(1, NUM_CTAS, edit_ptx=edit) as conflicts, mock.patch.object(large_batch, "_partials", new_partials):
        x = norm.norm(x, torch.ones(256).bfloat16(), None, 1e-5, "rms")
        got = run(x, residual, layer)
    assert not any(conflicts[name] for name in conflicts if ".v2" in name or ".v4" in name), f"bank conflicts: {conflicts}"
    check("int4 int", got, x, residual, layer, weights)
    assert not any(buffer.any() for buffer in partials), "partial sums are not zero"


def decode(edit: Edit) -> None:
    """Two launches of decode rows in three splits that combine by counter. The queries of the second are the results of the first."""
    torch.manual_seed(0)
    case = Case([(1, 70), (1, 40)], heads=2, kv_heads=1, dtype=torch.bfloat16)
    q, k, v, rotary, cache, batch, params = attention.new_tokens(case, 64, False)
    queries, want = [q], []
    with emulating(0, NUM_CTAS, edit_ptx=edit):
        for _ in range(2):
            want.append(attention.expected(queries[-1], k, v, rotary, cache, batch, params)[0])
            queries.append(kernels._empty_output(q, cache))
            new = kernels.StepTokens(k, v, rotary)
            kernels.decode(queries[-2], cache, batch, params, queries[-1], AttentionTile(16, 16, 4, 2), Splits(3), new)
    assert all(relative_error(y.flatten(1), x) < TOLERANCE[torch.bfloat16] for y, x in zip(queries[1:], want, strict=True))
    assert not kernels._finished_counters(q.device).any(), "counters are not zero"


def skinny(edit: Edit) -> None:
    """2 tokens against int4 in groups of 64 with integer zeros: the second launch reads the activations that the first quantized."""
    torch.manual_seed(0)
    weight, real = linear("int4 int 64", 64, 256, False, torch.bfloat16, "cpu")
    x = torch.randn(2, 256).bfloat16()
    with emulating(0, NUM_CTAS, edit_ptx=edit):
        y = int4.packed_linear(x, weight)
    assert relative_error(y, x.double() @ real.T) < 0.01


def split_k(edit: Edit) -> None:
    """304 FP8 features in two slices, of rows that the launch before has quantized; twice, because counters must be zero again."""
    torch.manual_seed(0)
    source, weight = torch.randn(70, 304).bfloat16(), torch.randn(136, 304).bfloat16()
    tile = LargeGemmTile(128, 128, 2, 16, max_slices=2)
    with emulating(0, 5, edit_ptx=edit):
        w = quantize_rows(weight, "fp8", 304)
        for _ in range(2):
            x = quantize_rows(source, "fp8", 304)
            scales = {"x_scale": x.scale, "weight_scale": w.scale}
            y = large_gemm.large_gemm(x.values, w.values, tile, **scales)
            want = (x.values.double() * x.scale[:, None].double()) @ (w.values.double() * w.scale[:, None].double()).T
            assert relative_error(y, want) < TOLERANCE[torch.bfloat16]
    assert not large_gemm.finished_counters(y.device).any(), "counters are not zero"


CASES = {"split-K": split_k, "large batch": large, "small batch": small, "attention": decode, "skinny": skinny}


def run(case: str, edit: Edit) -> None:
    """Raises AssertionError where the result is wrong, or the emulator finds a fault."""
    for scratch in SCRATCH:
        scratch.cache_clear()
    CASES[case](edit)
