"""A layer's tail in one launch, beside its linears one by one and beside float64.

Triton is imported inside functions: tests/kernels, collected after this area, must ask for the interpreter before Triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from oracle import relative_error
from torch import Tensor

from stoker.kernels.quantized import Int4Weight, Tail, TailLinear
from stoker.kernels.reference.linear import around
from stoker.kernels.reference.tail import tail as one_by_one
from stoker.kernels.types import PLAIN, Fusion
from stoker.quant.dense import DenseLinear
from stoker.quant.fp8 import Fp8, Fp8Linear
from stoker.quant.int4 import Int4Linear
from stoker.quant.int8 import Int8Linear, round_rows

FORMS = ["dense", "fp8", "bytes", "int4 none", "int4 int", "int4 float"]
# (heads' features, hidden, MLP's, qkv): programs without a tile, features that end inside a turn, several tiles a program, Llama-3.1-8B
SHAPES = [(256, 512, 768, 320), (1280, 1024, 2816, 1536), (2048, 2560, 6912, 3072), (4096, 4096, 14336, 6144)]
BOUND = 0.01  # of what is bfloat16 between linears, and nothing else


def linear(form: str, n: int, k: int, bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Tensor]:
    """(the linear on the device, its weight in float64)."""
    weight = torch.randn(n, k, device="cuda") * k**-0.5 * torch.rand(n, 1, device="cuda").exp()
    given = torch.randn(n).bfloat16().cuda() if bias else None
    if form == "dense":
        return DenseLinear(weight.to(dtype), given), weight.to(dtype).double()
    if form == "fp8":
        stored = Fp8(compensate=False).quantize(weight, partial_spec(n, k))
        codes, scale = stored["weight"], stored["scale"]
        return Fp8Linear(codes, scale, "token", None, given), codes.double() * scale.double()[:, None]
    if form == "bytes":
        codes, scale = round_rows(weight)
        return Int8Linear(codes, scale, given), codes.double() * scale.double()[:, None]
    from stoker.kernels.triton.quant_int4 import dequantize_int4, pack_int4

    kind, group = (*form.split()[1:], "128")[:2]
    groups = -(-k // int(group))
    scale = (torch.rand(n, groups, device="cuda") * 0.5 + 0.5).mul(k**-0.5 / 4).half()
    zero = torch.randint(5, 11, (n, groups), dtype=torch.uint8, device="cuda") if kind == "int" else None
    offset = (-8 * scale.float() + torch.randn(n, groups, device="cuda") * k**-0.5 / 8).half() if kind == "float" else None
    packed = pack_int4(Int4Weight(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"), scale, zero, offset, int(group)))
    return Int4Linear(packed, given, None), dequantize_int4(packed.packed, 0, n, k, torch.float32).double()


def partial_spec(n: int, k: int) -> Any:
    from stoker.layers.specs import LinearSpec

    return LinearSpec(name="a", in_features=k, parts=(n,))


def problem(form: str, shape: tuple[int, ...], dtype: torch.dtype, biases: bool, last: bool, gate: str) -> tuple[Tail, list[Tensor]]:
    """(the tail, its weights in float64)."""
    heads, hidden, size, qkv = shape
    norm = lambda: Fusion("rms", (torch.rand(hidden) + 0.5).to(dtype).cuda(), None, 1e-5)  # noqa: E731
    made, wide = [], []
    for n, k, fusion in (
        (hidden, heads, PLAIN),
        (2 * size, hidden, replace(norm(), gate=gate)),
        (hidden, size, PLAIN),
        (qkv, hidden, norm()),
    ):
        op, real = linear(form, n, k, biases, dtype)
        made.append(TailLinear(op, op.row_weight(), fusion))
        wide.append(real)
    return Tail(*made[:3], None if last else made[3]), wide


def in_float64(x: Tensor, stream: Tensor, parts: Tail, weights: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The tail without any rounding between its linears."""
    linears = []
    for one, real in zip(parts.linears, weights, strict=False):
        bias = 0 if one.weight.bias is None else one.weight.bias.double()
        fusion = replace(one.fusion, norm_weight=None if one.fusion.norm_weight is None else one.fusion.norm_weight.double())
        product = partial(lambda h, w, b: h @ w.T + b, w=real, b=bias)
        linears.append(TailLinear(lambda h, f, product=product: around(h, f, product), None, fusion))
    return one_by_one(x.double(), stream.double(), Tail(*linears[:3], linears[3] if len(linears) > 3 else None))


def errors(got: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None]) -> list[float]:
    assert [y is None for y in got] == [y is None for y in want]
    return [relative_error(mine.cpu(), theirs.cpu()) for mine, theirs in zip(got, want, strict=True) if mine is not None]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("form", FORMS)
def test_a_tail_is_its_linears(form: str, shape: tuple[int, ...]) -> None:
    from stoker.kernels.triton import tail as launcher
    from stoker.kernels.triton import tail_few

    torch.manual_seed(0)
    for rows, dtype, biases, last, gate in (
        (1, torch.bfloat16, False, False, "silu"),
        (1, torch.float16, True, True, "gelu_tanh"),
        (2, torch.bfloat16, True, True, "gelu_tanh"),
        (3, torch.float16, False, False, "silu"),
        (4, torch.bfloat16, False, False, "silu"),
    ):
        parts, weights = problem(form, shape, dtype, biases, last, gate)
        assert launcher.takes_tail(parts, rows) == (rows <= tail_few.TILES[parts.out.weight.form].most)
        x, stream = torch.randn(rows, shape[0]).to(dtype).cuda(), torch.randn(rows, shape[1]).to(dtype).cuda()
        x[0, 3] *= 20
        torch.full((1 << 22,), float("nan"), device="cuda")  # what is allocated next holds this
        got = tail_few.tail_few(x, stream, parts)
        for row in range(rows):  # a row is what it is alone
            alone = tail_few.tail_few(x[row : row + 1], stream[row : row + 1], parts)
            assert all(mine is theirs or torch.equal(mine[0], theirs[row]) for mine, theirs in zip(alone, got, strict=True))
        wrong = errors(got, in_float64(x, stream, parts, weights))
        if form == "fp8":  # a norm that is off by a bit moves all codes: as far from the truth as codes are one by one
            apart = errors(one_by_one(x, stream, parts), in_float64(x, stream, parts, weights))
            assert all(mine < 1.2 * theirs < 0.1 for mine, theirs in zip(wrong, apart, strict=True)), (wrong, apart)
        else:
            assert max(wrong) < BOUND


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kind", ["none 128", "int 128", "float 128", "int 64", "none 32", "float 32"])
def test_a_tail_of_rows_is_its_linears(kind: str, shape: tuple[int, ...]) -> None:
    """Rows that fill no tile of tokens too; what one row is does not depend on the others."""
    from stoker.kernels.triton import tail as launcher

    torch.manual_seed(0)
    for rows, biases, last, gate in (
        (6, False, False, "silu"),
        (16, True, False, "silu"),
        (27, True, True, "gelu_tanh"),
        (64, False, False, "silu"),
    ):
        parts, weights = problem(f"int4 {kind}", shape, torch.bfloat16, biases, last, gate)
        assert launcher.takes_tail(parts, rows)
        x, stream = torch.randn(rows, shape[0]).bfloat16().cuda(), torch.randn(rows, shape[1]).bfloat16().cuda()
        x[0, 3] *= 20
        torch.full((1 << 24,), float("nan"), device="cuda")  # what is allocated next holds this
        got = launcher.tail(x, stream, parts)
        assert max(errors(got, in_float64(x, stream, parts, weights))) < BOUND
        others = torch.randperm(rows)
        others[rows // 2] = rows // 2
        moved = launcher.tail(x[others].contiguous(), stream[others].contiguous(), parts)
        for mine, theirs in zip(got, moved, strict=True):
            assert mine is None or torch.equal(mine[others], theirs)


def test_rows_of_other_kinds_are_left_alone() -> None:
    from stoker.kernels.triton import tail as launcher

    parts, small = (problem(f"int4 int {group}", SHAPES[0], torch.bfloat16, False, False, "silu")[0] for group in (128, 32))
    halves, _ = problem("int4 int", SHAPES[0], torch.float16, False, False, "silu")
    codes, _ = problem("bytes", SHAPES[0], torch.bfloat16, False, False, "silu")
    ragged, _ = problem("int4 int", (256, 384, 768, 320), torch.bfloat16, False, False, "silu")
    assert [rows for rows in (1, 2, 4, 5, 33, 64, 65) if launcher.takes_tail(parts, rows)] == [1, 2, 5, 33, 64]
    assert [rows for rows in (1, 2, 4, 5, 33, 64, 65) if launcher.takes_tail(small, rows)] == [5, 33, 64]
    assert not any(launcher.takes_tail(other, 32) for other in (halves, codes, ragged))


@pytest.mark.parametrize(("form", "rows"), [("fp8", 1), ("dense", 3), ("int4 int", 1), ("int4 int", 27), ("int4 float 32", 27)])
def test_tails_meet_in_every_replay(form: str, rows: int) -> None:
    """Programs meet a few times a launch and leave their counters as they are: 200 replays of 8 launches end where the first one did."""
    from stoker.kernels.triton import tail as launcher

    torch.manual_seed(1)
    parts, _ = problem(form, SHAPES[1], torch.bfloat16, False, False, "silu")
    x, stream = torch.randn(rows, 1280).bfloat16().cuda(), torch.randn(rows, 1024).bfloat16().cuda()
    first = launcher.tail(x, stream, parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many = [launcher.tail(x, stream, parts) for _ in range(8)]
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    for after, qkv in many:
        assert torch.equal(after, first[0])
        assert torch.equal(qkv, first[1])


@pytest.mark.parametrize(("form", "rows"), [("bytes", 1), ("dense", 4), ("fp8", 3), ("int4 int", 2), ("int4 int", 12)])
def test_nan_stays_in_sight_and_in_its_row(form: str, rows: int) -> None:
    from stoker.kernels.triton import tail as launcher

    parts, _ = problem(form, SHAPES[0], torch.bfloat16, False, False, "silu")
    x, stream = torch.randn(rows, 256).bfloat16().cuda(), torch.randn(rows, 512).bfloat16().cuda()
    x[0, 7] = float("nan")
    for made in launcher.tail(x, stream, parts):
        assert made[0].isnan().all()
        assert not made[1:].isnan().any()


def test_weights_of_other_kinds_are_left_alone() -> None:
    from stoker.kernels.triton import tail as launcher

    parts, _ = problem("bytes", SHAPES[0], torch.bfloat16, False, False, "silu")
    other, _ = problem("int4 int", SHAPES[0], torch.bfloat16, False, False, "silu")
    odd, _ = linear("bytes", 500, 256, False)
    assert not launcher.takes_tail(replace(parts, up=other.up), 1)
    assert not launcher.takes_tail(replace(parts, out=TailLinear(odd, odd.row_weight(), PLAIN)), 1)
    assert not launcher.takes_tail(replace(parts, up=replace(parts.up, fusion=replace(parts.up.fusion, norm_kind="layer"))), 1)
    assert not launcher.takes_tail(replace(parts, down=replace(parts.down, weight=None)), 1)
