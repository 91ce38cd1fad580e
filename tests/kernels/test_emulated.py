"""Kernels that no interpreter runs, and what programs tell each other while they run, on an emulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_compile import uninterpreted

HERE = Path(__file__).parent
FORMS = ["dense", "fp8", "bytes", "int4 int", "int4 float 64", "int4 none 32"]


@pytest.mark.parametrize("what", [["attention"], *(["tail", form] for form in FORMS)], ids=" ".join)
def test_on_an_emulated_device(what: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "emulate.py"), *what],
        env=uninterpreted(),
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr[-3000:]
