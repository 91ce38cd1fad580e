"""The end of sums over ranks that ran beside other kernels: in the interpreter against the reference, and the copies of two ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.distributed import peer_copies
from stoker.distributed.peer_copies import NUM_SLOTS, PeerCopies
from stoker.kernels import ops
from stoker.kernels.reference import summands as reference
from stoker.kernels.triton import summands as kernels

SLOT_BYTES = 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 72), (5, 1024), (129, 33)])
def test_two_summands_and_the_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The bits of a rounded sum and a separate addition, as after an all-reduce, in rows of a larger tensor."""
    a, b, residual, expected = (torch.randn(shape).to(dtype) for _ in range(4))
    whole = torch.full((shape[0] + 2, shape[1]), 7.0, dtype=dtype)
    kernels.add_summands((a, b), residual, whole[1:-1])
    reference.add_summands((a, b), residual, expected)
    assert torch.equal(whole[1:-1], expected) and torch.equal(expected, (a + b) + residual)
    assert (whole[0] == 7).all() and (whole[-1] == 7).all()


def test_one_summand_is_the_sum() -> None:
    total, residual, out, other = (torch.randn(4, 8) for _ in range(4))
    kernels.add_summands((total,), residual, out)
    ops.add_summands((total,), residual, other)
    assert torch.equal(out, total + residual) and torch.equal(other, out)


class FakeStream:
    """A stream whose operations are complete when they are launched."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None:
        assert event == "copied"

    def record_event(self) -> str:
        return "copied"


class SharedMemory:
    """PyTorch's handle of symmetric memory for two ranks, which are threads."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(NUM_SLOTS * SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.changed, self.signals = threading.Condition(), [[False] * NUM_SLOTS for _ in range(2)]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        return self.buffers[rank].view(dtype)[offset:][: sizes[0] * sizes[1]].view(sizes)


class RankHandle:
    """The handle of one rank. Signals are flags: a second one before the first is consumed is an error."""

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        self.memory, self.rank = memory, rank
        self.get_buffer = memory.get_buffer

    def put_signal(self, dst_rank: int, channel: int) -> None:
        with self.memory.changed:
            assert dst_rank == 1 - self.rank and not self.memory.signals[dst_rank][channel], "the slot is still in use"
            self.memory.signals[dst_rank][channel] = True
            self.memory.changed.notify_all()

    def wait_signal(self, src_rank: int, channel: int) -> None:
        with self.memory.changed:
            assert src_rank == 1 - self.rank
            assert self.memory.changed.wait_for(lambda: self.memory.signals[self.rank][channel], 30)
            self.memory.signals[self.rank][channel] = False


def test_ranks_copy_summands_through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of several shapes and dtypes, with one or two unfinished ones, of ranks that run at different speeds."""

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        assert isinstance(chosen, FakeStream)
        yield

    monkeypatch.setattr(peer_copies.torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(peer_copies.torch.cuda, "stream", stream)
    memory, rounds = SharedMemory(), 200

    def message(rank: int, number: int) -> Tensor:
        rows, dtype = 1 + number % 5, (torch.float32, torch.bfloat16)[number % 2]
        return torch.full((rows, 32), 1.0 + rank + number % 50, dtype=dtype)

    def run(rank: int) -> int:
        draw, pending, checked = random.Random(rank), [], 0
        copies: Any = PeerCopies(RankHandle(memory, rank), rank, SLOT_BYTES, FakeStream())  # type: ignore[arg-type]
        for number in range(rounds):
            pending.append((number, copies.begin(message(rank, number))))
            while len(pending) > 1 or (pending and number % 7 < 2):
                index, finish = pending.pop(0)
                own, other = finish()
                assert torch.equal(own, message(rank, index)) and torch.equal(other, message(1 - rank, index))
                checked += 1
            threading.Event().wait(draw.choice((0, 0, 1e-4)))
        return checked + len([finish() for _, finish in pending])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [rounds, rounds]


@pytest.mark.parametrize(("num_slots", "is_safe"), [(4, True), (3, False)])
def test_slots_are_read_before_they_are_overwritten(num_slots: int, is_safe: bool) -> None:
    """All interleavings of two ranks in which one is late: a copy to a slot may happen as soon as its conditions hold.

    The order of a rank is that of overlapped layers: two sums begin, then in turn one is read and the second next one begins.
    """
    order: list[tuple[str, int]] = [("begin", 0), ("begin", 1)]
    for number in range(40):
        order.append(("read", number))
        if number % 4 < 2:
            order.append(("begin", number + 2))
        elif number % 4 == 3:
            order += [("begin", number + 1), ("begin", number + 2)]
    for late in range(len(order)):  # rank 1 stops before its operation `late`; rank 0 runs as far as the signals that it receives allow
        signalled = {number for kind, number in order[:late] if kind == "begin"}
        read = {number for kind, number in order[:late] if kind == "read"}
        for kind, number in order:
            if kind == "read" and number not in signalled:
                break
            if kind == "begin" and number >= num_slots and number - num_slots not in read:
                assert not is_safe
                return
    assert is_safe
