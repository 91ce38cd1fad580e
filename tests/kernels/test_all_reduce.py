"""The fused all-reduce between real processes: every rank runs the kernel in the interpreter, on inboxes in memory that they share."""

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
from stoker.distributed.inbox import EMPTY, MAX_BYTES, MEMORY_BYTES, UNIT_BYTES, Inboxes
from stoker.kernels.triton import all_reduce

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 2), (4, 1)])
def test_ranks_sum_through_inboxes(ranks: int, rounds: int, tmp_path: Path) -> None:
    """Every size, way and turn: right sums and norms, and the same bits on every rank."""
    for rank in range(ranks):
        np.full(1 << 19, EMPTY, dtype=np.int32).tofile(tmp_path / f"inbox{rank}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(HERE / "rank_exchange.py"), *map(str, (rank, ranks, rounds, tmp_path))], env=environment,
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


def test_eight_ranks_have_room_for_every_way() -> None:
    inboxes = Inboxes([1 << 40] * 8, MEMORY_BYTES, 0, CPU)
    made = [inboxes.get(unit, two) for unit in (UNIT_BYTES, 16384) for two in (False, True)]
    places = [(inbox.addresses[0], inbox.num_units * inbox.num_slots * inbox.unit_bytes * 3) for inbox in made if inbox is not None]
    assert len(places) == 4 and all(inbox is not None and inbox.num_units * inbox.unit_bytes == MAX_BYTES for inbox in made)
    assert all(begin + size == following for (begin, size), (following, _) in pairwise(places))
    assert inboxes.get(16384, True) is made[3] and inboxes.get(8192, True) is None and inboxes.get(24, False) is None


class Two(Group):
    """A group whose other rank never writes."""

    size = 2

    def __init__(self) -> None:
        self.memory = torch.full((2, MEMORY_BYTES // 4), EMPTY, dtype=torch.int32)
        self.inboxes = Inboxes([m.data_ptr() for m in self.memory], MEMORY_BYTES, 0, CPU)


def test_inboxes_that_do_not_work_are_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(all_reduce, "CHECK_LOOKS", 3)
    group = Two()
    all_reduce.check_inboxes(group)
    assert group.inboxes is None and "sums through them are wrong" in caplog.text
    monkeypatch.setattr(all_reduce, "exchange", lambda *given, **more: 1 / 0)
    group = Two()
    all_reduce.check_inboxes(group)
    assert group.inboxes is None and "division by zero" in caplog.text
