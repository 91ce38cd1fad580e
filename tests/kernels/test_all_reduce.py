"""All-reduce through inboxes between real processes: each rank runs the kernel in the interpreter, with inboxes in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.distributed.group import Group
from stoker.distributed.inbox import EMPTY, Inboxes, memory_bytes
from stoker.kernels.triton import all_reduce

HERE = Path(__file__).parent
CPU = torch.device("cpu")
MAX_BYTES = 8 << 10  # as in all_reduce_rank.py


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 2), (4, 1)])
def test_ranks_sum_through_inboxes(ranks: int, rounds: int, tmp_path: Path) -> None:
    """Several sizes and dtypes, one-shot and two-shot, over several turns: sums are correct, and bitwise equal on all ranks."""
    for rank in range(ranks):
        np.full(memory_bytes(ranks, MAX_BYTES) // 4, EMPTY, dtype=np.int32).tofile(tmp_path / f"inbox{rank}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(HERE / "all_reduce_rank.py"), *map(str, (rank, ranks, rounds, tmp_path))], env=environment,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.wait(100) == 0, process.stderr and process.stderr.read()[-3000:]
    finally:
        for process in processes:
            process.kill()
    first, *others = (torch.load(tmp_path / f"sums{rank}.pt") for rank in range(ranks))
    for other in others:
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_inboxes_fill_their_memory(ranks: int) -> None:
    inboxes = Inboxes([rank << 40 for rank in range(ranks)], 1, CPU)
    every = (*inboxes.all_reduces, inboxes.fused_layers)
    assert [inbox.num_slots for inbox in every] == ([2, 2] if ranks == 2 else [ranks, ranks + 1, ranks])
    assert every[0].addresses[1] == 1 << 40
    for inbox, following in pairwise(every):
        assert inbox.addresses[1] + inbox.num_bytes == following.addresses[1]
    assert every[-1].addresses[1] + every[-1].num_bytes == (1 << 40) + memory_bytes(ranks)


class PairGroup(Group):
    """A group whose other rank never writes."""

    size = 2

    def __init__(self) -> None:
        self.memory = torch.full((2, memory_bytes(2, MAX_BYTES) // 4), EMPTY, dtype=torch.int32)
        self.inboxes = Inboxes([m.data_ptr() for m in self.memory], 0, CPU, MAX_BYTES)


def test_inboxes_that_do_not_work_are_disabled_with_the_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(all_reduce, "CHECK_POLLS", 3)
    group = PairGroup()
    all_reduce.check_inboxes(group)
    assert group.inboxes is None and "sums through them are wrong" in caplog.text
    monkeypatch.setattr(all_reduce, "sum_through_inbox", lambda *args, **kwargs: 1 / 0)
    group = PairGroup()
    all_reduce.check_inboxes(group)
    assert group.inboxes is None and "division by zero" in caplog.text
