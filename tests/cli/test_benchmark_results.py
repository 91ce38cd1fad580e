"""Benchmark results: their provenance, also outside of git, and percentiles."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import stoker
from stoker.cli.benchmark.results import percentile, provenance, source_commit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Older results that lack some of the fields, and that no run has replaced since. A run writes the fields, and its name leaves this list.
WITHOUT_PROVENANCE = {
    "of CPUs, the machine or the commit was not recorded": """
        accuracy accuracy_long_context accuracy_untied_head chaos_cpu cpu_quant cpu_quant_one_thread endpoints observability_cost sse_stub
        triton_compare executor_overhead_tp8""",
    "of GPUs": """
        h100_prompt_attention h200_before_and_after h200_chaos h200_fused_layer_small_batch h200_gpt2_bf16 h200_linear_tiles
        h200_llama1b_bf16 h200_llama70b_fp8 h200_llama8b_bf16 h200_step_mixtral_bf16 h200_step_tiles h200x4_allreduce h200x4_engines""",
    "of other programs, from another session": "h200_peers",
    "computed from other results or from sizes of models": """
        h200_step_floors h200_llama70b_fp8_step_times h200_llama8b_fp8_step_times h200_llama8b_fp8kv_step_times
        h200_throughput_floors h200x2_llama70b_fp8_step_times h200x8_llama70b_fp8_tp8_step_times""",
}


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


def test_benchmarks_write_their_provenance() -> None:
    """Except for the one that measures nothing, and whose results a test compares."""
    found = 0
    for path in sorted(BENCHMARKS.rglob("*.py")):
        source = path.read_text()
        if path.name != "step_floor.py" and re.search(r'add_argument\(\s*"--(json|output)"', source):
            found += 1
            assert "provenance(" in source, f"{path.name} writes results without their provenance"
    assert found > 30


def has_provenance(value: Any) -> bool:
    """Whether this value of a JSON file, or one inside, has all fields of a provenance."""
    if isinstance(value, dict):
        return value.keys() >= {"date", "device", "versions", "commit"} or any(map(has_provenance, value.values()))
    return isinstance(value, list) and any(map(has_provenance, value))


def test_results_have_their_provenance() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in (BENCHMARKS / "results").glob("*.json")}
    exempt = {name for names in WITHOUT_PROVENANCE.values() for name in names.split()}
    assert exempt <= results.keys()
    assert {name for name, result in results.items() if not has_provenance(result)} - exempt == set()
    for name, result in results.items():
        if isinstance(result, dict) and "provenance" in result and name not in exempt:
            assert result["provenance"].keys() == result.keys() - {"provenance"}, f"parts of {name}.json"


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


def test_floor_reads_experts_in_their_own_format() -> None:
    """Qwen3-30B-A3B has 128 experts of 3 x 2048 x 768 weights in each of 48 layers. One answer token of a prompt of one token."""
    script = run_benchmark("throughput_floor")
    model = msgspec.json.decode((BENCHMARKS / "models" / "qwen3-30b-a3b" / "config.json").read_bytes(), type=script["Model"])
    assert model.experts == 128 and model.expert_weights == 48 * 3 * 2048 * 768 and model.experts_read(1) == pytest.approx(8)
    rates = script["Rates"](linear_tflops=1e3, attention_tflops=1e3, memory_tbs=1.0, weight_bytes=2.0, cache_bytes=2.0, expert_bytes=0.5)
    floor = script["floor_of"](1, 1, 1, model, rates, kv_cache_tokens=4096, max_num_tokens=8192)
    assert floor.linears_s == pytest.approx((2 * model.attention_weights + 0.5 * 8 * model.expert_weights) / 1e12)
    assert floor.head_s == pytest.approx(2 * model.head_weights / 1e12)


def run_benchmark(name: str) -> dict[str, Any]:
    """The names of a script of benchmarks/, which may import its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return runpy.run_path(str(BENCHMARKS / f"{name}.py"))
