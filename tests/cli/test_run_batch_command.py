"""`stoker run-batch` in a process of its own: results, errors per line, and a run that continues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_batch(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "stoker", "run-batch", *args], capture_output=True, input=stdin)


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def test_a_batch_is_processed_and_continued(tiny_engine: Path, tmp_path: Path) -> None:
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    completion = {"prompt": "the quick", "max_tokens": 4, "ignore_eos": True}
    text = line("a", "/v1/completions", **completion) + line("b", "/v1/completions", prompt="x", temperature=-1)
    requests.write_text(text + line("c", "/v1/completions", **completion))
    results.write_text('{"id": "r", "custom_id": "c", "response": {"status_code": 200, "body": {}}, "error": null}\n{"id": "cut')
    done = run_batch(str(tiny_engine), "-i", str(requests), "-o", str(results))
    assert done.returncode == 1 and b"1 requests completed, 1 failed, 1 were completed or failed before" in done.stderr, done.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert set(rows) == {"a", "b", "c"} and rows["c"]["id"] == "r"
    body = rows["a"]["response"]["body"]
    assert body["usage"]["completion_tokens"] == 4 and body["choices"][0]["text"]
    assert rows["b"]["response"]["status_code"] == 400 and rows["b"]["response"]["body"]["error"]["param"] == "temperature"
    again = run_batch(str(tiny_engine), "-i", "-", "-o", str(results), stdin=requests.read_bytes())  # nothing is left
    assert again.returncode == 0 and b"3 were completed or failed before" in again.stderr


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{\n", "line 1: "),
        (line("a", "/v1/embeddings", input="x"), "url must be"),
        (line("a", "/v1/completions", prompt="x") * 2, "used twice"),
    ],
)
def test_a_wrong_file_is_refused_before_the_model_is_read(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "requests.jsonl").write_text(content)
    done = run_batch("no-such-engine", "-i", str(tmp_path / "requests.jsonl"), "-o", str(tmp_path / "results.jsonl"))
    assert done.returncode != 0 and expected in done.stderr.decode() and b"no-such-engine" not in done.stderr


def test_an_output_file_with_other_content_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(line("a", "/v1/completions", prompt="x"))
    (tmp_path / "results.jsonl").write_text("precious text\n")
    done = run_batch("engine", "-i", str(tmp_path / "requests.jsonl"), "-o", str(tmp_path / "results.jsonl"))
    assert done.returncode != 0 and b"not results of a batch" in done.stderr
    assert (tmp_path / "results.jsonl").read_text() == "precious text\n"
