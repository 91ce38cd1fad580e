"""generate, chat and bench on a tiny engine, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stoker import LLM, SamplingParams
from stoker.cli.bench.report import percentile
from stoker.cli.options import lines_of


def stoker(*args: str, stdin: str = "") -> str:
    done = subprocess.run([sys.executable, "-m", "stoker", *args], capture_output=True, text=True, input=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers(tiny_engine: Path) -> dict[str, str]:
    prompts = ["the quick", "brown fox", "lazy dog"]
    with LLM(tiny_engine, kv_cache_tokens=1024) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    return {prompt: answer.choices[0].text for prompt, answer in zip(prompts, completions, strict=True)}


def test_generate_streams_the_whole_answer(tiny_engine: Path, answers: dict[str, str]) -> None:
    shown = stoker("generate", str(tiny_engine), "the quick", "--max-tokens", "12", "--ignore-eos")
    assert shown == answers["the quick"] + "\n"


def test_generate_writes_json_lines_for_a_file_of_prompts(tiny_engine: Path, answers: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("brown fox\n\nlazy dog\n")
    shown = stoker("generate", str(tiny_engine), "-f", str(tmp_path / "prompts.txt"), "--json", "--max-tokens", "12", "--ignore-eos")
    rows = [json.loads(line) for line in shown.splitlines()]
    assert [row["prompt"] for row in rows] == ["brown fox", "lazy dog"]
    assert [row["choices"][0]["text"] for row in rows] == [answers["brown fox"], answers["lazy dog"]]
    assert [row["usage"]["completion_tokens"] for row in rows] == [12, 12]


def test_chat_remembers_until_it_is_reset(tiny_engine: Path) -> None:
    """The same message gets the same answer as first and after /reset; in between the conversation is longer."""
    shown = stoker("chat", str(tiny_engine), "--max-tokens", "6", "--ignore-eos", stdin="hello\nhello\n/reset\nhello\n\nnot read\n")
    with LLM(tiny_engine, kv_cache_tokens=1024) as llm:
        first = [{"role": "user", "content": "hello"}]
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        one = llm.chat(first, params).choices[0].text
        two = llm.chat([*first, {"role": "assistant", "content": one}, *first], params).choices[0].text
    assert shown == f"{one}\n{two}\n{one}\n"


def test_bench_throughput_counts_what_was_asked(tiny_engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    stoker(
        "bench", "throughput", str(tiny_engine), "--requests", "3", "--requests", "8", "--input-len", "16", "--output-len", "8",
        "--json", str(out),
    )  # fmt: skip
    told = json.loads(out.read_text())
    assert [row["requests"] for row in told["results"]] == [3, 8]
    assert all(row["output tokens/s"] == pytest.approx(row["requests"] * 8 / row["total s"]) for row in told["results"])
    assert 1 < told["results"][0]["rows a step"] <= 3
    assert told["engine"]["dtype"] == "float32"
    assert told["versions"]["stoker"] and told["versions"]["torch"] and told["device"]


def test_bench_latency_has_a_row_for_each_batch_and_context(tiny_engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    stoker(
        "bench", "latency", str(tiny_engine), "--batch", "1", "--batch", "4", "--context", "8", "--context", "64", "--steps", "8",
        "--json", str(out),
    )  # fmt: skip
    rows = json.loads(out.read_text())["results"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 8), (1, 64), (4, 8), (4, 64)]
    assert all(row["first token ms"] > 0 and row["step p99 ms"] >= row["step p50 ms"] > 0 for row in rows)


def test_bench_serving_starts_a_server_and_checks_its_counts(tiny_engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    stoker(
        "bench", "serving", str(tiny_engine), "--concurrency", "1", "--concurrency", "4", "--input-len", "8", "--output-len", "64",
        "--options", "--kv-cache-tokens 1024", "--json", str(out),
    )  # fmt: skip
    one, four = json.loads(out.read_text())["results"]
    assert (one["clients"], four["clients"]) == (1, 4)
    for row in (one, four):
        assert 0 < row["TTFT p50 ms"] <= row["e2e p50 ms"] <= row["e2e p99 ms"]
    assert one["rows a step"] == 1.0
    assert four["rows a step"] > 1.0


def test_percentile_is_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (1, 20, 21, 50, 99, 100)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]


def test_lines_of_a_file_leave_empty_ones_out(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n  \ntwo\n")
    assert lines_of(tmp_path / "keys", "key") == ["one", "two"]
