"""Benchmark results: their provenance, also outside of git, and percentiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stoker
from stoker.cli.benchmark.results import percentile, provenance, source_commit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_provenance_names_device_versions_and_commit() -> None:
    found = provenance()
    assert found["device"] and found["versions"]["stoker"] == stoker.__version__
    assert found["versions"]["torch"] == torch.__version__ and "triton" in found["versions"]


def test_outside_of_git_the_commit_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("STOKER_COMMIT", "0123abc")
    assert source_commit() == "0123abc"
    monkeypatch.delenv("STOKER_COMMIT")
    assert source_commit() is None


def test_gpu_benchmarks_write_their_provenance() -> None:
    for path in sorted(BENCHMARKS.rglob("*.py")):
        source = path.read_text()
        if "torch.cuda" in source and "--json" in source:
            assert "provenance(" in source, f"{path.name} writes results without their provenance"


def test_percentile_is_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (1, 20, 21, 50, 99, 100)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]
