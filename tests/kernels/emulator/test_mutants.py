"""Faults in kernels that the emulated device detects (`mutants.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from mutants import CASES, MUTANTS

pytestmark = pytest.mark.slow

Detected = Callable[[str], dict[str, str]]


@pytest.fixture(scope="session")
def detected(tmp_path_factory: pytest.TempPathFactory, uninterpreted: Callable[..., str]) -> Detected:
    """The mutants of a case and how each was detected. A case runs once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def detected(case: str) -> dict[str, str]:
        results = folder / f"mutants-{case}.json"
        with FileLock(f"{results}.lock"):
            if not results.exists():
                results.write_text(uninterpreted(Path(__file__).with_name("mutants.py"), case))
        found: dict[str, str] = json.loads(results.read_text())
        return found

    return detected


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_detected(name: str, detected: Detected) -> None:
    assert detected(MUTANTS[name].case)[name]


def test_there_are_mutants_of_several_kernels() -> None:
    assert len(MUTANTS) >= 10 and len(CASES) == 5
