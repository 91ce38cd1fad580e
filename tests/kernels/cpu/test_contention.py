"""Teams of threads that wait for a suspended thread become smaller, and grow again."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stoker.kernels.native import build, library, linear

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler is installed")

FORK = ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
DEADLINE_S = 60.0
DELAY_S = 0.005
MOST_DELAYS = 5  # of DELAY_S, after which a team is smaller


class Teams:
    """Stands for GOMP_parallel: the calling thread does all work, and then waits as if another thread of the team were suspended."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of the teams
        self.is_delayed = True
        self.fork = FORK(self._run)

    def _run(self, function: ctypes._FuncPointer, data: int, threads: int, flags: int) -> None:
        started = time.perf_counter()
        function(data)
        self.sizes.append(threads)
        end = time.perf_counter() + max(DELAY_S, 3 * (time.perf_counter() - started))
        while self.is_delayed and time.perf_counter() < end:
            pass


WEIGHT = torch.ones(1024, 512)


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch) -> Teams:
    """The teams of the C kernels in this test."""
    found, kernels = Teams(), library.kernels()
    assert not isinstance(kernels, str)
    address = ctypes.cast(found.fork, ctypes.c_void_p).value
    monkeypatch.setattr(linear, "kernels", lambda: kernels._replace(fork=address))
    return found


def in_new_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread, because each thread has limits of its own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def multiply() -> torch.Tensor:
    return linear.linear(torch.ones(1, 512), WEIGHT)


def limited(threads: int) -> int:
    """The threads of a step that may have `threads`."""
    library.limit_threads(threads)
    return torch.get_num_threads()


def shrink(threads: int) -> int:
    """Delay teams of `threads` until they are smaller. Returns their new size."""
    for _ in range(MOST_DELAYS):
        assert torch.equal(multiply(), torch.full((1, 1024), 512.0))
        if (size := limited(threads)) < threads:
            return size
    pytest.fail("the team did not become smaller")


@pytest.mark.parametrize(("threads", "fewer"), [(2, 1), (4, 3), (8, 6)])
def test_teams_that_wait_become_smaller(threads: int, fewer: int, teams: Teams) -> None:
    def work() -> None:
        torch.set_num_threads(threads)
        assert shrink(threads) == fewer  # also if other work delays the first team
        assert set(teams.sizes) == {threads}

    in_new_thread(work)


def test_teams_grow_again(teams: Teams) -> None:
    def work() -> None:
        torch.set_num_threads(2)
        for _ in range(2):
            shrink(2)
            deadline = time.perf_counter() + DEADLINE_S
            while limited(2) == 1:
                assert time.perf_counter() < deadline, "the team did not grow"

    in_new_thread(work)


def test_teams_without_delays_keep_their_threads(teams: Teams) -> None:
    teams.is_delayed = False

    def work() -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            multiply()
            assert limited(2) == 2

    in_new_thread(work)
