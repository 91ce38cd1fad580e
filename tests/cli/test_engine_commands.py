"""The commands that run an engine (generate, chat, eval, bench), each in a process of its own.

Most of these processes fork from one that has imported torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_commands import Finished, run_forked

from stoker import LLM, SamplingParams
from stoker.cli.options import read_lines


def started(*args: str) -> str:
    """The standard output of a command that is started as users start it, and must succeed."""
    done = subprocess.run([sys.executable, "-m", "stoker", *args], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Runs a command, which must succeed, in a forked process."""

    def run(*args: str, stdin: str = "") -> Finished:
        done = run_forked(tmp_path_factory.mktemp("command"), *args, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture
def stoker(finished: Callable[..., Finished]) -> Callable[..., str]:
    """Runs a command in a forked process, and returns its standard output."""
    return lambda *args, stdin="": finished(*args, stdin=stdin).stdout


@pytest.fixture(scope="module")
def answers(tiny_engine: Path) -> dict[str, str]:
    """Prompt: greedy answer of 12 tokens, from the Python API."""
    prompts = ["the quick", "brown fox", "lazy dog"]
    with LLM(tiny_engine, kv_cache_tokens=1024) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    return {prompt: answer.choices[0].text for prompt, answer in zip(prompts, completions, strict=True)}


def test_generate_streams_the_whole_answer(tiny_engine: Path, answers: dict[str, str]) -> None:
    output = started("generate", str(tiny_engine), "the quick", "--max-tokens", "12", "--ignore-eos")
    assert output == answers["the quick"] + "\n"


def test_generate_writes_json_lines_for_a_file_of_prompts(
    stoker: Callable[..., str], tiny_engine: Path, answers: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("brown fox\n\nlazy dog\n")
    output = stoker("generate", str(tiny_engine), "-f", str(tmp_path / "prompts.txt"), "--json", "--max-tokens", "12", "--ignore-eos")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["prompt"] for row in rows] == ["brown fox", "lazy dog"]
    assert [row["choices"][0]["text"] for row in rows] == [answers["brown fox"], answers["lazy dog"]]
    assert [row["usage"]["completion_tokens"] for row in rows] == [12, 12]


def test_an_encoding_without_unicode_gets_question_marks_and_complete_json(tiny_engine: Path) -> None:
    latin = {"PYTHONIOENCODING": "latin-1"}
    args = ["generate", str(tiny_engine), "hello", "--max-tokens", "8", "--ignore-eos"]
    plain, as_json = (
        subprocess.run([sys.executable, "-m", "stoker", *args, *more], capture_output=True, env={**os.environ, **latin})
        for more in ([], ["--json"])
    )
    text = json.loads(as_json.stdout)["choices"][0]["text"]
    assert not text.isascii()
    assert plain.stdout == (text + "\n").encode("latin-1", errors="replace"), plain.stderr


def test_chat_sends_the_conversation_until_it_is_reset(stoker: Callable[..., str], tiny_engine: Path) -> None:
    """The first message and the first one after /reset get the same answer; the one between gets that of a longer conversation."""
    output = stoker("chat", str(tiny_engine), "--max-tokens", "6", "--ignore-eos", stdin="hello\nhello\n/reset\nhello\n\nnot read\n")
    with LLM(tiny_engine, kv_cache_tokens=1024) as llm:
        first = [{"role": "user", "content": "hello"}]
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        one = llm.chat(first, params).choices[0].text
        two = llm.chat([*first, {"role": "assistant", "content": one}, *first], params).choices[0].text
    assert output == f"{one}\n{two}\n{one}\n"


def test_generate_reads_standard_input(stoker: Callable[..., str], tiny_engine: Path, answers: dict[str, str]) -> None:
    arguments = ["generate", str(tiny_engine), "--max-tokens", "12", "--ignore-eos"]
    assert stoker(*arguments, stdin="the quick\n") == answers["the quick"] + "\n"
    row = json.loads(stoker(*arguments, "--json", stdin="brown fox\nlazy dog\n"))
    assert row["prompt"] == "brown fox\nlazy dog"  # one prompt, whatever its number of lines


def test_chat_commands(finished: Callable[..., Finished], tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = [
        "/help", "/set max-tokens 3", "/set temperature hot", "/set top_x 1", "/sav x", "hello", f"/save {file}", '"""',
        "/two", "lines", '"""', "//slash", f"/save {file}", f"/save {tiny_engine / 'config.json'}", "/save", "/exit", "not read",
    ]  # fmt: skip
    done = finished("chat", str(tiny_engine), "--ignore-eos", "--system", "Be brief.", stdin="\n".join(lines) + "\n")
    saved = json.loads(file.read_text())
    assert saved["model"] == str(tiny_engine)
    assert [message["role"] for message in saved["messages"]] == ["system", *["user", "assistant"] * 3]
    assert [m["content"] for m in saved["messages"] if m["role"] == "user"] == ["hello", "/two\nlines", "/slash"]
    with LLM(tiny_engine, kv_cache_tokens=1024) as llm:
        expected = llm.chat(saved["messages"][:2], SamplingParams(max_tokens=3, ignore_eos=True)).choices[0].text
    assert saved["messages"][2]["content"] == expected
    for text in (
        "/set [NAME VALUE]  Sets a sampling parameter", "max_tokens 3\n", "temperature='hot' is refused: it is not a number.",
        "there is no sampling parameter top_x. Use one of: top_", "unknown command /sav. Use one of: /save", "7 messages are saved to",
        "config.json exists. Name another file.", "/save needs a file.",
    ):  # fmt: skip
        assert text in done.stderr


def test_chat_ends_without_standard_input(tiny_engine: Path) -> None:
    code = "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, '-m', 'stoker', 'chat', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, str(tiny_engine)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_perplexity_of_the_first_bytes_uses_whole_characters(stoker: Callable[..., str], tiny_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("naïve " * 9)
    args = ["eval", "perplexity", str(tiny_engine), "--text", str(tmp_path / "text"), "--window", "64", "--json", "--max-bytes"]
    inside_character, before_character = (json.loads(stoker(*args, count)) for count in ("3", "2"))
    assert inside_character == before_character
    assert inside_character["tokens"] > 0


def test_bench_throughput_counts_the_requested_tokens(stoker: Callable[..., str], tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    stoker(
        "bench", "throughput", str(tiny_engine), "--requests", "3", "--requests", "8", "--input-len", "16", "--output-len", "8",
        "--json", str(file),
    )  # fmt: skip
    result = json.loads(file.read_text())
    assert [row["requests"] for row in result["results"]] == [3, 8]
    assert all(row["output tokens/s"] == pytest.approx(row["requests"] * 8 / row["total s"]) for row in result["results"])
    assert 1 < result["results"][0]["rows a step"] <= 3
    assert result["engine"]["dtype"] == "float32"
    assert result["versions"]["stoker"] and result["versions"]["torch"] and result["device"]


def test_bench_latency_has_a_row_for_each_batch_and_context(stoker: Callable[..., str], tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    stoker(
        "bench", "latency", str(tiny_engine), "--batch", "1", "--batch", "4", "--context", "8", "--context", "64", "--steps", "8",
        "--json", str(file),
    )  # fmt: skip
    rows = json.loads(file.read_text())["results"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 8), (1, 64), (4, 8), (4, 64)]
    assert all(row["first token ms"] > 0 and row["step p99 ms"] >= row["step p50 ms"] > 0 for row in rows)


def test_bench_serving_starts_a_server_and_checks_its_counts(tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    started(
        "bench", "serving", str(tiny_engine), "--concurrency", "1", "--concurrency", "4", "--input-len", "8", "--output-len", "64",
        "--options", "--kv-cache-tokens 1024", "--json", str(file),
    )  # fmt: skip
    one, four = json.loads(file.read_text())["results"]
    assert (one["clients"], four["clients"]) == (1, 4)
    for row in (one, four):
        assert 0 < row["TTFT p50 ms"] <= row["e2e p50 ms"] <= row["e2e p99 ms"]
    assert one["rows a step"] == 1.0
    assert four["rows a step"] > 1.0


def test_empty_lines_of_a_file_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n  \ntwo\n")
    assert read_lines(tmp_path / "keys", "key") == ["one", "two"]
