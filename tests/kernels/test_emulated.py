"""Kernels that no interpreter runs, on an emulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_compile import uninterpreted

HERE = Path(__file__).parent


@pytest.mark.parametrize("form", ["dense", "fp8", "bytes", "int4 int", "int4 float 64", "int4 none 32"])
def test_a_tail_of_few_tokens_is_its_linears(form: str) -> None:
    command = [sys.executable, str(HERE / "emulate_tails.py"), form]
    run = subprocess.run(command, env=uninterpreted(), cwd=HERE.parents[1], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
