"""Run kernels on an emulated device: `fused_layer FORM`, for one form of weights, or `attention`. A process of its own, uninterpreted."""

from __future__ import annotations

import sys

import test_rope_attention as attention
import torch
from emulated.launch import emulating
from fused_layer_cases import check, problem
from oracle import Case
from test_attention import test_splits_meet_though_a_result_says_nothing

from stoker.kernels.triton.attention.tiles import AttentionTile, Splits
from stoker.kernels.triton.fused_layer.large_batch import launch as large_batch
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.types import FusedLayer

Made = tuple[torch.Tensor, torch.Tensor | None]
# (heads' features, hidden ones, the MLP's, qkv's): features that end inside a turn, programs without a tile, several tiles a program
SHAPE = (256, 512, 768, 320)
# rows, dtype, biases, last, gate, programs
FEW = [
    (1, torch.bfloat16, False, False, "silu", 35),
    (2, torch.float16, True, True, "gelu_tanh", 5),
    (3, torch.bfloat16, True, False, "silu", 4),
    (4, torch.bfloat16, False, True, "silu", 6),
]
SOME = [(6, torch.bfloat16, False, False, "silu", 4), (27, torch.bfloat16, True, False, "gelu_tanh", 7)]  # of int4


def run(x: torch.Tensor, stream: torch.Tensor, parts: FusedLayer, programs: int, seed: int) -> Made:
    with emulating(seed, programs) as lost:
        made = (small_batch.run_small_batch if len(x) <= small_batch.MAX_TOKENS else large_batch.run_large_batch)(x, stream, parts)
    assert not any(lost[name] for name in lost if ".v2" in name or ".v4" in name), f"lanes meet in banks: {lost}"
    return made


def fused_layer(form: str) -> None:
    weights_dtype = {"dense": "bfloat16", "bytes": "int8"}.get(form.split()[0], form.split()[0])
    most = tuning_for("NVIDIA H200", 90).tile("fused_layer_small_batch", weights_dtype).max_tokens
    cases = FEW[:most] if not form.startswith("int4") else [FEW[0], FEW[most - 1], SOME[form.endswith("32")]]
    for rows, dtype, biases, last, gate, programs in cases:
        parts, weights = problem(form, SHAPE, dtype, biases, last, gate, "cpu")
        x, stream = torch.randn(rows, SHAPE[0]).to(dtype), torch.randn(rows, SHAPE[1]).to(dtype)
        x[0, 3] *= 20
        got = run(x, stream, parts, programs, rows)
        check(form, got, x, stream, parts, weights)
        if rows == most:
            a_row_is_what_it_is_alone(got, x, stream, parts, programs)
        if rows in (most, SOME[0][0]):
            nan_stays_in_its_row(got, x, stream, parts, programs)


def a_row_is_what_it_is_alone(got: Made, x: torch.Tensor, stream: torch.Tensor, parts: FusedLayer, programs: int) -> None:
    last = slice(len(x) - 1, len(x))
    for one, alone in zip(got, run(x[last], stream[last], parts, programs + 1, 1), strict=True):
        assert one is None or (alone is not None and torch.equal(one[last], alone))


def nan_stays_in_its_row(got: Made, x: torch.Tensor, stream: torch.Tensor, parts: FusedLayer, programs: int) -> None:
    """And in sight; the others are what the launch before made them, which left messages and counters as they were."""
    x[0, 7] = float("nan")
    for one, other in zip(got, run(x, stream, parts, programs, 0), strict=True):
        assert one is None or (other is not None and other[0].isnan().all() and torch.equal(one[1:], other[1:]))


def attend() -> None:
    """Rows whose keys are in no cache yet; splits that combine by messages, with programs in any order, and by a counter."""
    half, wide = (
        Case([(1, 90), (1, 1), (1, 40), (1, 33)], block_size=32, dtype=torch.bfloat16),
        Case([(1, 70)], size=128, dtype=torch.float16),
    )
    for case, dim, splits, programs in (
        (half, 64, Splits(3), 132), (half, 64, Splits(8, 2), 132), (half, 64, Splits(4), 8), (wide, 128, Splits(4), 132),
    ):  # fmt: skip
        with emulating(case.size, programs):
            attention.check(case, dim, False, AttentionTile(16, 16, 4, 2), splits)
    with emulating():
        test_splits_meet_though_a_result_says_nothing()


if __name__ == "__main__":
    torch.manual_seed(0)
    attend() if sys.argv[1] == "attention" else fused_layer(sys.argv[2])
