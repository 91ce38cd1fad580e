"""The C kernels on other processors: x86 without AVX-512 or AVX2, and 64-bit ARM (cross-compiled, and run by an emulator).

The other tests of this folder compare the kernels of this machine with float64. Here a program of deterministic cases is compiled for each
processor, and its results are compared with those of this machine.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import test_gemm
import test_native_groups
import test_prefill
import test_scores
import torch

from stoker.kernels.native import build
from stoker.kernels.native.library import load_kernels

FOLDER = Path(__file__).parent
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
X86 = platform.machine() == "x86_64"
COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)
Run = Callable[..., np.ndarray]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compiles cases with other flags than -march=native, and returns their results."""

    def results(*flags: str, cases: str = "kernel_cases.c", compiler: str = COMPILER or "", emulator: tuple[str, ...] = ()) -> np.ndarray:
        program = tmp_path_factory.mktemp("cases") / "cases"
        common = [flag for flag in build.FLAGS if flag not in ("-march=native", "-shared", "-fPIC")]
        command = [compiler, *common, *flags, f"-I{build._SOURCES}", "-o", str(program), str(FOLDER / cases), "-lm"]
        subprocess.run(command, check=True, timeout=120)
        done = subprocess.run([*emulator, str(program)], check=True, timeout=120, stdout=subprocess.PIPE)
        return np.frombuffer(done.stdout, np.float32)

    return results


@pytest.fixture(scope="module")
def here(run: Run) -> np.ndarray:
    """The results of this machine, with activations in float32 (digits.h needs VNNI)."""
    return run("-march=native", *(["-mno-avx512vnni"] if X86 else []))


@pytest.fixture(scope="module")
def panels_here(run: Run) -> np.ndarray:
    """The results of this machine's kernels of many rows."""
    if X86 and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no kernels of many rows")
    return run("-march=native", cases="panel_cases.c")


def check(found: np.ndarray, here: np.ndarray, tolerance: float = 1e-5) -> None:
    assert found.shape == here.shape and len(here) > 100_000 and np.isfinite(here).all()
    # Sums have another order. A bfloat16 result can round to its neighbour, and an int8 one to the next integer.
    errors = np.abs(found - here) / np.maximum(np.abs(here), 1.0)
    assert errors.max() < 2**-7 and np.quantile(errors, 0.99) < tolerance, (errors.max(), np.quantile(errors, 0.99))
    assert np.count_nonzero(here) > 0.9 * len(here)


@pytest.mark.skipif(not X86, reason="not an x86 processor")
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ("-march=x86-64",)], ids=["AVX2", "SSE2"])
def test_x86_with_fewer_features(flags: tuple[str, ...], run: Run, here: np.ndarray) -> None:
    if "-mavx2" in flags and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    check(run(*flags), here)


def test_activations_in_16_bits(run: Run, here: np.ndarray) -> None:
    check(run("-march=native"), here, 8e-5)


@pytest.fixture
def avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of this process are compiled for AVX2, also on processors that have AVX-512."""
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    flags = [flag for flag in build.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(build, "FLAGS", (*flags, "-mavx2", "-mfma"))
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def test_tiles_of_avx2(avx2: None) -> None:
    """Linears, scores and attention of many rows, against float64."""
    for count in (9, 61):
        test_gemm.test_float32_weights("nbgr", count)
    test_native_groups.test_70_rows_of_a_weight_in_groups(276, 17, torch.float32)
    test_scores.test_float32(13, 33, 31, 3.0, 5.0)
    test_scores.test_large_and_equal_logits()
    for case in ("mixed", "head 18", "window"):
        test_prefill.test_prefill_rows(test_prefill.CASES[case])


needs_emulator = pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)), reason="no cross-compiler or emulator of ARM"
)


@needs_emulator
def test_arm(run: Run, here: np.ndarray) -> None:
    check(run("-static", compiler=ARM_COMPILER, emulator=(ARM_EMULATOR,)), here)


@needs_emulator
def test_many_rows_on_arm(run: Run, panels_here: np.ndarray) -> None:
    check(run("-static", cases="panel_cases.c", compiler=ARM_COMPILER, emulator=(ARM_EMULATOR,)), panels_here)
