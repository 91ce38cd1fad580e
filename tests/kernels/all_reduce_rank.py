"""One rank of test_all_reduce.py: a process with the interpreter, whose inbox is a file that all ranks map into memory."""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from stoker.base.process import collect_rarely

collect_rarely()

import interpreter  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

interpreter.install()

from oracle import TOLERANCE, relative_error  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from stoker.distributed.inbox import Inboxes  # noqa: E402
from stoker.kernels.triton.all_reduce import check_sums, sum_through_inbox  # noqa: E402
from stoker.kernels.triton.all_reduce_kernel import Choices  # noqa: E402
from stoker.kernels.triton.moe import launch as moe  # noqa: E402

HIDDEN = 96
MAX_BYTES = 8 << 10  # of a message: small, because the interpreter is slow
# (rows, dtype, two-shot if there are more than two ranks, with a residual): mixed, so that the units of an inbox are at different turns.
CALLS = [
    (33, torch.bfloat16, False, True), (1, torch.bfloat16, False, True), (33, torch.bfloat16, True, True),
    (20, torch.float32, False, False), (12, torch.float16, False, True), (40, torch.bfloat16, True, True),
    (42, torch.bfloat16, False, True), (1, torch.bfloat16, True, False), (16, torch.float32, True, True),
    (11, torch.bfloat16, False, True), (22, torch.float16, True, True),
]  # fmt: skip


# (tokens, features, choices of a token, dtype, whether results are in another order than the choices, with a residual)
CHOICES = [
    (2, 2048, 2, torch.bfloat16, False, True), (3, 1024, 3, torch.float16, True, True), (1, 1024, 1, torch.float32, True, False),
]  # fmt: skip

_load = InterpreterBuilder.create_masked_load


def polling_load(self: InterpreterBuilder, *args: Any) -> Any:
    """A volatile load sleeps, so that the ranks that send can run on the same core, and reads each value as a whole, as a device does.

    The interpreter copies a 16-bit value in two overlapping loads: a store between them gives a value that was never sent. Two loads that
    agree saw no store of a peer, because it stores each value once per turn.
    """
    loaded = _load(self, *args)
    if args[-1]:  # is volatile
        time.sleep(2e-4)
        while not np.array_equal(loaded.data, (again := _load(self, *args)).data):
            loaded = again
    return loaded


def mapped(path: Path) -> torch.Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int32)


def message(call: int, turn: int, rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed((call * 10 + turn) * 10 + rank)).to(dtype)
    values[0, :3] = torch.tensor([-0.0, float("inf"), 0.0])  # -0.0 has the bits that mean "not arrived"
    return values


class ExpertResults:
    """The results of a rank's experts for the choices of all tokens, and their sum by token in float64."""

    def __init__(self, call: int, turn: int, rank: int, tokens: int, size: int, top_k: int, dtype: torch.dtype, *, is_sorted: bool) -> None:
        generator = torch.Generator().manual_seed(1000 + (call * 10 + turn) * 10 + rank)
        self.results = torch.randn(tokens * top_k, size, generator=generator).to(dtype)
        rows = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(call)).int() if is_sorted else None
        weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(turn))
        self.choices = Choices(weights, rows)
        by_choice = self.results if rows is None else self.results[rows.long()]
        self.expected = (by_choice.double().view(tokens, top_k, size) * weights.double()[..., None]).sum(1)


def combine(experts: ExpertResults) -> torch.Tensor:
    """This rank's summand, in a launch of its own."""
    return moe._combine(experts.results, experts.choices, None)


def main(rank: int, ranks: int, rounds: int, folder: Path) -> None:
    InterpreterBuilder.create_masked_load = polling_load
    memory = [mapped(folder / f"inbox{i}") for i in range(ranks)]
    inboxes = Inboxes([m.data_ptr() for m in memory], rank, torch.device("cpu"), MAX_BYTES)
    draw, sums = random.Random(rank), []
    for turn in range(rounds):
        for call, (rows, dtype, is_two_shot, adds) in enumerate(CALLS):
            time.sleep(draw.choice((0.0, 0.0, 0.01)))  # ranks arrive early and late
            residual = message(call, turn, 9, rows, dtype) if adds else None
            own = message(call, turn, rank, rows, dtype)
            inbox = inboxes.two_shot if is_two_shot and inboxes.two_shot is not None else inboxes.one_shot
            total = sum_through_inbox(own, residual, inbox)
            expected = sum(message(call, turn, r, rows, dtype).double() for r in range(ranks))
            expected = expected if residual is None else expected + residual.double()
            assert torch.isinf(total[0, 1]) and relative_error(total[:, 2:], expected[:, 2:]) < TOLERANCE[dtype], (call, turn)
            sums.append(total)
        for call, (tokens, size, top_k, dtype, is_sorted, adds) in enumerate(CHOICES):
            experts = [ExpertResults(call, turn, each, tokens, size, top_k, dtype, is_sorted=is_sorted) for each in range(ranks)]
            residual = experts[0].results[:tokens] if adds else None
            inbox = inboxes.all_reduces[call % len(inboxes.all_reduces)]
            total = sum_through_inbox(experts[rank].results, residual, inbox, choices=experts[rank].choices)
            expected = sum(each.expected for each in experts) + (0 if residual is None else residual.double())
            assert relative_error(total, expected) < TOLERANCE[dtype], (call, turn)
            separate = sum_through_inbox(combine(experts[rank]), residual, inbox)
            assert torch.equal(total, separate), "the launch that combines and sums has the bits of two"
            sums.append(total)
    assert check_sums(inboxes, torch.device("cpu"), 1 << 20)
    torch.save(sums, folder / f"sums{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
