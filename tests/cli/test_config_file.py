"""`stoker serve --config FILE`, and the completion of command lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.cli.api_keys import collect_keys
from stoker.cli.completions import complete_words
from stoker.cli.main import main

Serve = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Serve:
    """Runs `stoker serve --dry-run --config FILE` for the text of a file; returns exit status, standard output and standard error."""

    def call(text: str, *args: str) -> tuple[int, str, str]:
        (tmp_path / "server.yaml").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["stoker", "serve", "--dry-run", "--config", "server.yaml", *args])
        capfd.readouterr()
        status = main()
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


def test_options_come_from_the_file_and_the_command_line_precedes(tiny_engine: Path, dry_run: Serve) -> None:
    text = f"""
        model: {tiny_engine}
        port: 0
        max_batch_size: 4
        protocol: [openai, kserve]
        chunked-prefill: false
        devices: null
        model-name: from-file
        api-key: key-that-is-secret
    """
    status, output, error = dry_run(text, "--model-name", "from-line")
    assert status == 0, error
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith("  ")}
    assert rows["max_batch_size"].split() == ["4", "server.yaml"]
    assert rows["http_port"].split() == ["0", "server.yaml"]
    assert rows["chunked_prefill"].split() == ["False", "server.yaml"]
    assert rows["protocols"].split() == ["openai,", "kserve", "server.yaml"]
    assert rows["model_name"].split(maxsplit=1) == ["from-line", "command line"]
    assert "secret" not in output + error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nprt: 1", "server.yaml:2: unknown option prt. Use one of: port"),
        ("port: eighty", "server.yaml:1: port: "),
        ("port: 1\nhttp-port: 2", "unknown option http-port"),
        ("max-batch-size: 1\nmax_batch_size: 2", "server.yaml:2: max_batch_size sets an option for the second time."),
        ("chunked-prefill: 3", "server.yaml:1: chunked-prefill=3 is refused. Use true or false."),
        ("host: {a: 1}", "server.yaml:1: host is refused. Use text or a number"),
        ("config: other.yaml", "unknown option config"),
        ("- port", "server.yaml is not a mapping"),
        ("port: 1\nport: 2", "duplicate"),
        ("tool-parser: foo\nmodel: x/y", "unknown tool parser 'foo'"),
        ("api-key: short\nmodel: x/y", "an API key is refused. Use at least 8"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, message: str, dry_run: Serve) -> None:
    status, output, error = dry_run(text)
    assert (status, output) == (2, "")
    assert message in error and error.count("\n") == 1 and "short" not in error


COMPLETIONS = [
    (["se"], ["serve"]),
    (["bench", ""], ["latency", "throughput", "serving"]),
    (["serve", "--pol"], ["--policy"]),
    (["serve", "--policy", "max"], ["max_utilization"]),
    (["generate", "engine", "--device", ""], ["cpu", "cuda"]),
    (["--v"], ["--version"]),
    (["completion", "z"], ["zsh"]),
    (["serve", "--chunked"], ["--chunked-prefill"]),
    (["nothing", ""], []),
    (["serve", "--host", ""], []),  # a value that is not one of a list: the shell completes file names
]


@pytest.mark.parametrize(("words", "expected"), COMPLETIONS)
def test_words_are_completed(words: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    assert complete_words(words) == expected


def test_the_script_completes_in_bash(tmp_path: Path) -> None:
    program = tmp_path / "stoker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m stoker "$@"\n')
    program.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH; eval "$(stoker completion bash)"
        complete -p stoker >/dev/null && COMP_WORDS=(stoker serve --policy max) COMP_CWORD=3
        _stoker_complete; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("max_utilization\n", "")


def test_keys_of_a_server_come_from_options_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of --api-keys are read from the file by the server, also later."""
    monkeypatch.setenv("STOKER_API_KEY", "key-in-variable")
    assert collect_keys(["key-as-option", "key-as-option"]) == ("key-as-option", "key-in-variable")
    monkeypatch.setenv("STOKER_API_KEY", "  ")
    assert collect_keys([]) == ()
