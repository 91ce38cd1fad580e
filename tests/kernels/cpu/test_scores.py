"""Scores of tokens in the C kernel, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_cases import expected, fused, needs_compiler
from test_gemm import fp8_expected, fp8_weight

from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.native import quant_fp8, scores
from stoker.kernels.reference import scores as reference
from stoker.kernels.types import PLAIN, Fusion, TokenScores

pytestmark = needs_compiler


def score(
    x: torch.Tensor, weight: PackedWeight, targets: torch.Tensor, fusion: Fusion = PLAIN, scale: float = 1.0, softcap: float | None = None
) -> TokenScores:
    """The scores in score.c. Skips the test on processors without it."""
    native = scores._NATIVE_WEIGHTS[weight.format](weight)
    assert native is not None
    found = scores._score(x, native, weight.bias, targets, fusion, scale, softcap)
    return found if found is not None else pytest.skip("no AVX2")


def check(found: TokenScores, logits: torch.Tensor, targets: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert torch.equal(found.best, logits.argmax(-1).int())
    wanted = torch.log_softmax(logits, -1).gather(1, targets.long()[:, None])[:, 0]
    assert (found.likelihoods - wanted).abs().max() < tolerance


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (3.0, 5.0)])
@pytest.mark.parametrize(("rows", "size", "vocab"), [(1, 7, 2), (13, 33, 31), (40, 64, 1000)])
def test_float32(rows: int, size: int, vocab: int, scale: float, softcap: float | None) -> None:
    x, weight, targets = torch.randn(rows, size), torch.randn(vocab, size) / 4, torch.randint(0, vocab, (rows,), dtype=torch.int32)
    bias, fusion = torch.randn(vocab), fused(rows, vocab, size, torch.float32, "n")
    logits = expected(x, weight.double(), bias, fusion) * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    check(score(x, PackedWeight("dense", weight, bias=bias), targets, fusion, scale, softcap), logits, targets)


def test_fp8() -> None:
    if not quant_fp8.has_bfloat16_products():
        pytest.skip("no AVX512-BF16")
    x, weight, targets = torch.randn(30, 70), fp8_weight(200, 70), torch.randint(0, 200, (30,), dtype=torch.int32)
    weight = replace(weight, scale=weight.scale * 5)
    check(score(x, weight, targets), fp8_expected(x, weight, PLAIN), targets)


def test_large_and_equal_logits() -> None:
    """The largest logits come last or first, they exceed the range of exp, and the first of equal logits is the best."""
    weight = torch.zeros(100, 1)
    weight[:, 0] = torch.arange(100) // 2 * 30.0
    x, targets = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([99, 0, 50], dtype=torch.int32)
    found = score(x, PackedWeight("dense", weight), targets)
    assert found.best.tolist() == [98, 0, 0]
    assert torch.allclose(found.likelihoods, -torch.tensor([2.0, 2.0, 100.0]).log())


def test_the_number_of_threads_does_not_change_results() -> None:
    threads, x, weight = torch.get_num_threads(), torch.randn(50, 64), PackedWeight("dense", torch.randn(300, 64))
    targets, found = torch.randint(0, 300, (50,), dtype=torch.int32), []
    try:
        for count in (1, 3, 8):
            torch.set_num_threads(count)
            found.append(score(x, weight, targets))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a.likelihoods, found[0].likelihoods) and torch.equal(a.best, found[0].best) for a in found)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_other_weights_use_the_reference(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed a few at a time."""
    monkeypatch.setattr(reference, "MIN_ROWS", 7)
    monkeypatch.setattr(reference, "LOGITS_BYTES", 0)
    values, scale = torch.randint(-127, 128, (50, 32)).to(torch.int8), torch.rand(50) / 100
    x, targets = torch.randn(20, 32), torch.randint(0, 50, (20,), dtype=torch.int32)
    logits = x.double() @ (values.double() * scale[:, None].double()).t() * 0.5
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    check(ops.score_tokens(x, PackedWeight("int8", values, scale), targets, PLAIN, 0.5, softcap), logits, targets, 1e-3)
