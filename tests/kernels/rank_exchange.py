"""One rank of test_all_reduce: a process with the interpreter, whose inbox lies in memory that the other ranks' processes map too."""

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

import interpreter
import torch

interpreter.install()

from oracle import TOLERANCE, relative_error  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from stoker.distributed import inbox as inbox_module  # noqa: E402
from stoker.distributed.inbox import EMPTY, Inboxes  # noqa: E402
from stoker.kernels.triton import all_reduce  # noqa: E402
from stoker.kernels.triton.all_reduce import exchange, sums_arrive  # noqa: E402

HIDDEN = 96
EPS = 1e-5
# (rows, dtype, two-shot, norm, with a residual): sizes and ways mixed, so that units have taken different numbers of turns.
CALLS = [
    (3, torch.bfloat16, False, "rms", True), (1, torch.bfloat16, False, "rms", True), (3, torch.bfloat16, True, "rms", True),
    (4, torch.float32, False, None, False), (2, torch.float16, False, "layer", True), (7, torch.bfloat16, True, None, True),
    (4, torch.bfloat16, False, "rms", True), (1, torch.bfloat16, True, None, False), (3, torch.bfloat16, False, "rms", True),
    (3, torch.float32, True, "rms", True), (2, torch.bfloat16, False, None, True), (4, torch.bfloat16, True, "layer", True),
]  # fmt: skip


_load = InterpreterBuilder.create_masked_load


def patient_load(self: InterpreterBuilder, *args: Any) -> Any:
    """A look for what has not arrived leaves the core to those who send it."""
    if args[-1]:  # is volatile
        time.sleep(2e-4)
    return _load(self, *args)


def mapped(path: Path) -> torch.Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int32)


def message(call: int, turn: int, rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed((call * 10 + turn) * 10 + rank)).to(dtype)
    made[0, :3] = torch.tensor([-0.0, float("inf"), 0.0])  # what stands for nothing; what swallows everything
    return made


def main(rank: int, ranks: int, rounds: int, folder: Path) -> None:
    InterpreterBuilder.create_masked_load = patient_load
    inbox_module.MAX_BYTES = 8 << 10  # small places: the interpreter is slow
    if ranks > 2:
        all_reduce.MOST_BYTES = 512  # parts are waited for two by two, as wide rows' are
    memory = [mapped(folder / f"inbox{i}") for i in range(ranks)]
    half = 4 * len(memory[rank]) // 2
    checked, inboxes = (Inboxes([m.data_ptr() + at for m in memory], half, rank, torch.device("cpu")) for at in (0, half))
    assert (memory[rank][:1000] == EMPTY).all()
    draw, sums = random.Random(rank), []
    for turn in range(rounds):
        for call, (rows, dtype, is_two_shot, kind, adds) in enumerate(CALLS):
            time.sleep(draw.choice((0.0, 0.0, 0.01)))  # ranks come early and late
            unit = HIDDEN * dtype.itemsize if kind else 256
            residual = message(call, turn, 9, rows, dtype) if adds else None
            weight, bias = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(call))
            inbox = inboxes.get(unit, is_two_shot)
            assert inbox is not None
            mine = message(call, turn, rank, rows, dtype)
            out, total = exchange(mine, residual, inbox, weight if kind else None, bias if kind == "layer" else None, EPS, kind)
            wanted = sum(message(call, turn, r, rows, dtype).double() for r in range(ranks))
            wanted = wanted if residual is None else wanted + residual.double()
            assert torch.isinf(total[0, 1]) and relative_error(total[:, 2:], wanted[:, 2:]) < TOLERANCE[dtype], (call, turn)
            if kind:
                x = total[1:].double()
                x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
                normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + (bias if kind == "layer" else 0)
                assert rows == 1 or relative_error(out[1:], normed) < TOLERANCE[dtype], (call, turn)
            sums.append(total)
    assert sums_arrive(checked, torch.device("cpu"), 1 << 20)
    torch.save(sums, folder / f"sums{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
