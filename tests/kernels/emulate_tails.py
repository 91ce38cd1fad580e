"""Run a tail of few tokens on an emulated device, for one form of weights (argument 1). A process of its own, uninterpreted."""

from __future__ import annotations

import sys
from unittest import mock

import torch
from emulated.launch import emulating
from tails import check, problem

from stoker.kernels.quantized import Tail
from stoker.kernels.triton import tail_few

# (heads' features, hidden ones, the MLP's, qkv's): features that end inside a turn, programs without a tile, several tiles a program
SHAPE = (256, 512, 768, 320)
# rows, dtype, biases, last, gate, programs
CASES = [
    (1, torch.bfloat16, False, False, "silu", 35),
    (2, torch.float16, True, True, "gelu_tanh", 5),
    (3, torch.bfloat16, True, False, "silu", 4),
    (4, torch.bfloat16, False, True, "silu", 6),
]


def run(x: torch.Tensor, stream: torch.Tensor, parts: Tail, programs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    with mock.patch.object(tail_few, "num_multiprocessors", lambda device: programs), emulating(seed):
        return tail_few.tail_few(x, stream, parts)


def main(form: str) -> None:
    torch.manual_seed(0)
    most = tail_few.TILES["bfloat16" if form == "dense" else form.split()[0]].most
    for rows, dtype, biases, last, gate, programs in CASES[:most]:
        parts, weights = problem(form, SHAPE, dtype, biases, last, gate, "cpu")
        x, stream = torch.randn(rows, SHAPE[0]).to(dtype), torch.randn(rows, SHAPE[1]).to(dtype)
        x[0, 3] *= 20
        got = run(x, stream, parts, programs, rows)
        check(form, got, x, stream, parts, weights)
        if rows == most:  # a row is what it is alone, and NaN stays in sight and in its row
            x[0, 7] = float("nan")
            for one, alone in zip(got, run(x, stream, parts, programs, 0), strict=True):
                if one is not None and alone is not None:
                    assert alone[0].isnan().all()
                    assert torch.equal(one[1:], alone[1:])
            last_row = slice(rows - 1, rows)
            for one, alone in zip(got, run(x[last_row], stream[last_row], parts, programs + 1, 1), strict=True):
                assert one is None or (alone is not None and (rows == 1 or torch.equal(one[last_row], alone)))


if __name__ == "__main__":
    main(sys.argv[1])
