"""Results say where they come from: device, versions and commit, also where there is no git."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stoker
from stoker.cli.bench import report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_origin_names_device_versions_and_commit() -> None:
    found = report.origin()
    assert found["device"] and found["versions"]["stoker"] == stoker.__version__
    assert found["versions"]["torch"] == torch.__version__ and "triton" in found["versions"]


def test_the_commit_comes_from_the_environment_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("STOKER_COMMIT", "0123abc")
    assert report.commit() == "0123abc"
    monkeypatch.delenv("STOKER_COMMIT")
    assert report.commit() is None


def test_benchmarks_of_a_gpu_tell_their_origin() -> None:
    for path in sorted(BENCHMARKS.glob("*.py")):
        source = path.read_text()
        if "torch.cuda" in source and "--json" in source:
            assert "origin(" in source, f"{path.name} writes results without saying where they come from"
