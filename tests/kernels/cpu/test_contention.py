"""Teams of threads that wait for a suspended thread become smaller, and grow again."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stoker.kernels.native import build, library, linear

COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed")

FORK = ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
DELAY_S = 0.005
MOST_DELAYS = 5  # of DELAY_S, after which a team is smaller
WEIGHT = torch.ones(1024, 512)


class Teams:
    """Stands for GOMP_parallel: the calling thread does all work, and then waits as if another thread of the team were suspended."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of the teams
        self.fork = FORK(self._run)

    def _run(self, function: ctypes._FuncPointer, data: int, threads: int, flags: int) -> None:
        started = time.perf_counter()
        function(data)
        self.sizes.append(threads)
        end = time.perf_counter() + max(DELAY_S, 3 * (time.perf_counter() - started))
        while time.perf_counter() < end:
            pass


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


@pytest.mark.parametrize(("threads", "fewer"), [(2, 1), (4, 3), (8, 6)])
def test_steps_get_fewer_threads(threads: int, fewer: int, teams: Teams) -> None:
    def work() -> None:
        torch.set_num_threads(threads)
        for _ in range(MOST_DELAYS):
            assert torch.equal(linear.linear(torch.ones(1, 512), WEIGHT), torch.full((1, 1024), 512.0))
            library.limit_threads(threads)
            if torch.get_num_threads() < threads:
                break
        assert torch.get_num_threads() == fewer  # also if other work delays the first team
        assert set(teams.sizes) == {threads}

    in_new_thread(work)


class Region(ctypes.Structure):
    """What the calling thread does in a region, in nanoseconds."""

    _fields_ = [(name, ctypes.c_int64) for name in ("before", "work", "suspended", "after")]


@pytest.fixture(scope="module")
def team_clock(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """parallel.c with clocks that only regions move."""
    path, source = tmp_path_factory.mktemp("team") / "team.so", Path(__file__).with_name("team_clock.c")
    subprocess.run([COMPILER or "", *build.FLAGS, f"-I{build._SOURCES}", "-o", str(path), str(source)], check=True, timeout=60)
    loaded = ctypes.CDLL(str(path))
    loaded.run_region.argtypes, loaded.run_region.restype = [ctypes.c_int64, ctypes.POINTER(Region)], ctypes.c_int64
    return loaded


class Simulation:
    """Regions of the given times in milliseconds, of teams that may have `threads`."""

    def __init__(self, team_clock: ctypes.CDLL, threads: int = 2) -> None:
        team_clock.forget_contention()
        self._library, self._threads = team_clock, threads

    def sizes(self, duration: float, *, before: float = 0, work: float = 0, suspended: float = 0, after: float = 0) -> list[int]:
        """The sizes of the teams of `duration` milliseconds. A team of one thread does not wait for others."""
        region, found, passed = Region(*(round(ms * 1e6) for ms in (before, work, suspended, after))), [], 0.0
        while passed < duration:
            found.append(self._library.run_region(self._threads, ctypes.byref(region)))
            passed += work + suspended + (before + after if found[-1] > 1 else 0)
        return found


@pytest.mark.parametrize("wait", ["before", "after"])
@pytest.mark.parametrize(("threads", "sizes"), [(2, [2, 1]), (4, [4, 3]), (8, [8, 6])])
def test_teams_that_wait_become_smaller(threads: int, sizes: list[int], wait: str, team_clock: ctypes.CDLL) -> None:
    found = Simulation(team_clock, threads).sizes(30, work=0.1, **{wait: 3.9})
    assert list(dict.fromkeys(found)) == sizes
    assert found[:6] == [threads] * 5 + [sizes[1]]  # 20 ms


@pytest.mark.parametrize(("threads", "fewer"), [(2, 1), (4, 3)])
def test_a_crew_that_waits_becomes_smaller(threads: int, fewer: int, team_clock: ctypes.CDLL) -> None:
    """Within the replay: next to busy processes, one may take a second."""
    team_clock.forget_contention()
    region, sizes = Region(0, 100_000, 0, 3_900_000), (ctypes.c_int64 * 9)()
    team_clock.run_crew(ctypes.c_int64(threads), ctypes.c_int64(9), ctypes.byref(region), sizes)
    assert list(sizes) == [threads] * 5 + [fewer] * 4  # 20 ms


def test_short_waits_are_no_contention(team_clock: ctypes.CDLL) -> None:
    assert set(Simulation(team_clock).sizes(200, before=0.05, work=0.01, after=0.05)) == {2}


def test_a_suspended_thread_does_not_blame_the_others(team_clock: ctypes.CDLL) -> None:
    """With one thread it would be suspended as well."""
    assert set(Simulation(team_clock).sizes(1000, work=1, suspended=11)) == {2}


@pytest.mark.parametrize(("after", "fewer"), [(5, 2), (8, 1)])
def test_waits_are_compared_with_the_time_without_suspensions(after: float, fewer: int, team_clock: ctypes.CDLL) -> None:
    """24 ms, of which the thread runs 12: 5 ms of them are less than half, 8 are more, though less than half of 24."""
    assert Simulation(team_clock).sizes(48, work=12 - after, suspended=12, after=after)[-1] == fewer


def test_teams_grow_again(team_clock: ctypes.CDLL) -> None:
    simulation = Simulation(team_clock, 8)
    assert simulation.sizes(500, work=0.1, after=3.9)[-1] == 1
    assert simulation.sizes(60, work=1)[-1] == 1
    assert list(dict.fromkeys(simulation.sizes(400, work=1))) == [1, 2, 3, 4, 5, 7, 8]
    assert set(simulation.sizes(100, work=1)) == {8}


def test_larger_teams_are_tried_less_often_when_they_fail(team_clock: ctypes.CDLL) -> None:
    """The calling thread is not suspended, but the other one of a team is."""
    found = Simulation(team_clock).sizes(10_000, work=4, after=12)
    trials = [at for at, (last, size) in enumerate(itertools.pairwise(found)) if size > last]
    pauses = [4 * (end - begin) for begin, end in itertools.pairwise(trials)]
    assert pauses[:4] == pytest.approx([200, 400, 800, 1600], abs=60)
    assert pauses[4:] == pytest.approx([1600] * len(pauses[4:]), abs=60)
    assert len(trials) == 9


def test_no_larger_team_is_tried_while_the_thread_is_suspended(team_clock: ctypes.CDLL) -> None:
    simulation = Simulation(team_clock)
    assert simulation.sizes(40, work=1, after=4)[-1] == 1
    assert set(simulation.sizes(10_000, work=4, suspended=16)) == {1}
    assert simulation.sizes(60, work=4)[-1] == 1  # of the pause, which began with the last suspension
    assert simulation.sizes(100, work=4)[-1] == 2
