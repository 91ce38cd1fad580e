"""Crews: threads that stay together for all regions of a replay."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.kernels.native import build, library

COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed")
Check = Callable[[int, int, int, int, int], int]


@pytest.fixture(scope="module")
def check_crew(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """check_crew(fork, threads, regions, sleeps, seed): the errors of random regions."""
    path, source = tmp_path_factory.mktemp("crew") / "crew.so", Path(__file__).with_name("crew_cases.c")
    command = [COMPILER or "", *build.FLAGS, "-pthread", f"-I{build._SOURCES}", "-o", str(path), str(source)]
    subprocess.run(command, check=True, timeout=60)
    loaded = ctypes.CDLL(str(path))
    loaded.check_crew.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    loaded.check_crew.restype = ctypes.c_int64
    return loaded.check_crew  # type: ignore[no-any-return]


@pytest.mark.parametrize(("threads", "regions", "sleeps"), [(1, 50, 0), (2, 300, 0), (2, 40, 9), (4, 200, 0), (7, 60, 0), (3, 40, 5)])
def test_random_regions(threads: int, regions: int, sleeps: int, check_crew: Check) -> None:
    """Each item once, after the stage before and the preparation of its thread. With `sleeps`, threads sleep in all waits."""
    for seed in range(6):
        assert check_crew(0, threads, regions, sleeps, seed) == 0


def test_crews_of_several_threads(check_crew: Check) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda seed: check_crew(0, 1 + seed % 3, 60, 11 * (seed % 2), seed), range(12))) == [0] * 12


def test_the_threads_of_pytorch(check_crew: Check) -> None:
    kernels = library.kernels()
    if isinstance(kernels, str):
        pytest.skip("no C kernels")
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda seed: check_crew(kernels.fork, 2 + seed % 2, 40, 0, seed), range(9))) == [0] * 9


def test_a_crew_without_other_threads(check_crew: Check) -> None:
    """The OpenMP runtime may start fewer threads than the call requests."""
    fork_type = ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    alone = fork_type(lambda function, data, threads, flags: function(data))
    assert check_crew(ctypes.cast(alone, ctypes.c_void_p).value or 0, 4, 50, 0, 1) == 0
