"""Benchmark results: their provenance, also outside of git, and percentiles."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

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


def test_floors_of_steps_are_those_of_the_script() -> None:
    """The weights of Llama-3.1-8B in bfloat16 are 15.01 GB, and 1,000 tokens of its cache 0.131 GB: 3.425 ms at 4.42 TB/s."""
    found = run_benchmark("step_floor")["results"]()
    assert found == json.loads((BENCHMARKS / "results" / "h200_step_floors.json").read_text())
    first = found["cases"][0]["steps"][0]
    assert first == {"rows": 1, "weights_gb": 15.0093, "cache_gb": 0.1311, "floor_ms": 3.425}


def test_floor_of_a_run_with_experts_and_ranks() -> None:
    """One prompt of 128 tokens and one answer token on two ranks, of a model of two layers with one of two experts per token."""
    script = run_benchmark("throughput_floor")
    model = script["Model"](
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=1000,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    assert model.attention_weights == 2 * 256 * 6 * 128 and model.expert_weights == 2 * 3 * 256 * 512
    assert model.experts_read(1) == 1.0 and 1.9 < model.experts_read(8) < 2.0
    rates = script["Rates"](linear_tflops=1e-3, attention_tflops=1e-3, memory_tbs=1.0, weight_bytes=1.0, cache_bytes=1.0)
    floor = script["floor_of"](128, 1, 1, model, rates, kv_cache_tokens=4096, max_num_tokens=8192)
    assert floor.linears_s == pytest.approx(2 * 128 * (model.attention_weights + model.expert_weights) / 1e9)
    assert floor.head_s == pytest.approx(2 * model.head_weights / 1e9)
    assert floor.prompt_attention_s == pytest.approx(128 * 129 / 2 * 4 * 2 * 2 * 128 / 1e9)
    assert floor.decode_attention_s == 0.0


def run_benchmark(name: str) -> dict[str, Any]:
    """The names of a script of benchmarks/, which may import its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return runpy.run_path(str(BENCHMARKS / f"{name}.py"))
