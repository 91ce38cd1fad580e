"""How the `stoker` command fails and ends: one-line errors with a cure, exit statuses, signals; and `stoker doctor`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.cli.main import main

Run = Callable[..., tuple[int, str]]


def stoker(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker", *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; returns its exit status and standard error."""

    def call(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *args])
        return main(), capfd.readouterr().err

    return call


# Arguments, exit status, and a part of the message. Words in capitals are replaced by paths.
FAILURES = [
    (["generate", "ENGINE", "hi", "--temperature", "-1"], 2, "temperature=-1.0 is refused: it must be at least 0"),
    (["generate", "ENGINE", "hi", "--policy", "fifo"], 2, "policy='fifo' is refused. Use one of: guaranteed_no_evict"),
    (
        ["generate", "ENGINE", "hi", "--speculate", "ngrams"],
        2,
        "Use one of: none, ngram, request, or a directory with a slash, such as ./ngrams.",
    ),
    (["generate", "ENGINE", "hi", "--draft-tokens", "3"], 2, "draft_tokens=3 has no effect with speculate=none. Set"),
    (["serve", "ENGINE", "--no-adaptive-drafts", "--speculate", "none"], 2, "or leave adaptive_drafts out."),
    (["bench", "throughput", "ENGINE", "--draft-tree", "[0]"], 2, "Set speculate to the directory of a draft engine or of draft heads, or"),
    (["generate", "ENGINE", "hi", "--speculate", ""], 2, "speculate='' is refused."),
    (["generate", "ENGINE", "hi", "--transfer-timeout-s", "5"], 2, "transfer_timeout_s=5.0 has no effect without transfer."),
    (["generate", "ENGINE", ""], 2, "prompt=[] is refused: it is empty."),
    (["generate", "ENGINE", "hi", "--max-tokens", "65"], 2, "max_tokens=65 is refused: the engine's max_output_len is 64."),
    (["generate", "ENGINE", "--file", "NOWHERE"], 2, "cannot be read"),
    (["generate", "ENGINE", "hi", "--max-batch-size", "9"], 2, "Build the engine with --max-batch-size 9."),
    (["generate", "NOWHERE", "hi"], 1, "does not exist. Correct the path."),
    (["generate", "ENGINE", "hi", "--devices", "0"], 2, "devices=[0] name GPUs, and"),
    (["generate", "ENGINE", "hi", "--devices", "0;1"], 2, "devices='0;1' is refused. Write indices with commas between them: 0,1."),
    (["serve", "NOWHERE"], 1, "does not exist."),
    (["serve", "ENGINE", "--nnodes", "two"], 2, "Invalid value for '--nnodes': Input should be a valid integer"),
    (["serve", "ENGINE", "--port"], 2, "Option '--port' requires an argument. See stoker --help."),
    (["simulate", "EMPTY"], 2, "Missing option '--step-times'. See stoker simulate --help."),
    (["srve"], 2, "No such command 'srve'. Use one of: serve"),
    (["serve", "ENGINE", "--prot", "1"], 2, "No such option: --prot"),
    (["generate", "ENGINE", "hi", "--max-tokens", "many"], 2, "'--max-tokens'"),
    (["generate", "ENGINE"], 2, "give at least one, --file, or text on standard input"),
    (["bench", "serving"], 2, "give a model, or --url of a running server"),
    (["simulate", "EMPTY", "--step-times", "STEPS"], 2, "contains no request. Name a file with one request a line."),
    (["simulate", "TRACE", "--step-times", "STEPS", "--kv-cache-tokens", "100"], 2, "kv_cache_tokens=100 is refused: no request fits, and"),
    (["demo", "--engine", "--serve"], 2, "--engine only builds, and is refused together with --serve and --port."),
    (["demo", "--port", "65536"], 2, "port=65536 is refused. Use a whole number from 0 to 65535."),
    (["export", "triton", "ENGINE", "ENGINE"], 2, "is an engine or a checkpoint, and no repository. Name a new folder."),
    (["export", "ray", "absent", "OUT"], 2, "model=absent does not exist. Name a path, ORG/NAME or an engine of stoker list."),
    (["export", "slurm", "ENGINE", "OUT", "--gpus-per-node", "abc"], 2, "gpus_per_node='abc' is refused. Use a number from 1 to 9999"),
    (["export", "slurm", "ENGINE", "OUT", "--gpus-per-node", "h100:0"], 2, "gpus_per_node='h100:0' is refused."),
    (["export", "slurm", "ENGINE", "OUT", "--time", "tomorrow"], 2, "time='tomorrow' is refused. Use MINUTES, MINUTES:SECONDS,"),
    (["export", "slurm", "ENGINE", "OUT", "--host", "a b"], 2, "host='a b' is refused. Use an address or a host name"),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--no-such-option"], 2, "'--no-such-option' is refused: No such option"),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--port 1"], 2, "--port is refused. Use --port of stoker export slurm."),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--grpc-port x"], 2, "serve_options: --grpc-port: Input should be a valid"),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--grpc-port 99999"], 2, "grpc_port=99999 is refused. Use a whole number"),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--max-batch-size 9"], 2, "max_batch_size=9 is above the engine's 8."),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--quantize FP8"], 2, "--quantize is refused. Leave it out, or build"),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "--ray"], 2, "--ray is refused. Use stoker export ray."),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "-h"], 2, "--help is refused. Leave it out."),
    (["export", "slurm", "ENGINE", "OUT", "--serve-options", "other"], 2, "other is refused. Leave it out: the job serves the engine."),
    (["export", "ray", "ENGINE", "OUT", "--claim", "models"], 2, "claim has no effect without image: no manifest is written."),
    (["serve", "ENGINE", "--trace-sampling", "0.5"], 2, "trace_sampling=0.5 has no effect without otlp_endpoint."),
    (["serve", "ENGINE", "--cors-origin", "example.org"], 2, "cors_origins='example.org' is refused. Use * or an origin"),
    (["serve", "ENGINE", "--port", "8000", "--grpc-port", "8000"], 2, "grpc_port=8000 is refused: http_port is the same port."),
    (["serve", "ENGINE", "--protocol", "openai", "--with-test-models"], 2, "test_models needs the protocol kserve, which is not served."),
    (["serve", "NOWHERE.gguf"], 2, "does not exist. Correct the path."),
    (["serve", "DAMAGED"], 2, "Its config.json is damaged or belongs to another program."),
    (["serve", "ENGINE", "--port", "65536"], 2, "http_port=65536 is refused. Use a whole number from 0 to 65535."),
    (["serve", "ENGINE", "--host", "no-such-host.invalid", "--port", "0"], 2, "cannot be used"),
    (["inspect", "NOWHERE"], 1, "does not exist."),
    (["build", "NOWHERE", "-o", "OUT"], 1, "NOWHERE"),
    (["build", "NOWHERE", "--dry-run", "--memory-gib", "nan"], 2, "--memory-gib nan is refused. Use a number above 0, such as 80."),
    (["build", "NOWHERE", "-o", "OUT", "--memory-gib", "8"], 2, "--memory-gib 8 has no effect without --dry-run."),
    (["build", "NOWHERE", "-o", "OUT", "--no-verify", "--verify", "full"], 2, "--verify full and --no-verify contradict each other."),
    (["build", "NOWHERE", "-o", "OUT", "--no-verify", "--max-perplexity-increase", "5"], 2, "has no effect without verification."),
    (["build", "ENGINE", "-o", "OUT"], 1, "is an engine, and not a checkpoint. Build from the checkpoint that it was made from"),
    (["bench", "latency", "ENGINE", "--batch", "0"], 2, "batch=0 is refused. Use a whole number from 1"),
    (["bench", "latency", "ENGINE", "--batch", "9"], 2, "batch=9 is refused. Use a whole number from 1 to 8."),
    (["bench", "latency", "ENGINE", "--context", "0"], 2, "context=0 is refused. Use a whole number from 1"),
    (["bench", "throughput", "ENGINE", "--input-len", "5000"], 2, "input_len=5000 is refused."),
    (["bench", "latency", "ENGINE", "--breakdown"], 2, "--breakdown measures a GPU, and this engine runs on the CPU. Leave it out."),
    (["build", "NOWHERE", "-o", "OUT", "--compute-capability", "sm_90"], 2, "compute_capability='sm_90' is refused."),
    (["bench", "serving", "--url", "ftp://127.0.0.1"], 2, "Use an address such as http://127.0.0.1:8000."),
    (["bench", "serving", "--url", "http://127.0.0.1:1"], 1, "does not answer"),
    (["bench", "serving", "--url", "http://[::1"], 2, "Use an address such as http://127.0.0.1:8000."),
    (["bench", "serving", "--url", "http://127.0.0.1:99999"], 2, "Use an address such as http://127.0.0.1:8000."),
    (["bench", "serving", "ENGINE", "--options", "--model-name 'a"], 2, "Close every quote."),
    (["bench", "throughput", "ENGINE", "--json", "NOWHERE/x.json"], 2, "cannot be written"),
    (["bench", "latency", "ENGINE", "--json", "."], 2, "cannot be written"),
    (["generate", "ENGINE", "hi", "--device", "tpu"], 2, "device='tpu' is refused. Use one of: cpu, cuda."),
    (["generate", "ENGINE", "hi", "--num-threads", "5000"], 2, "Use a whole number from 1 to 4096."),
    (["generate", "ENGINE", "--file", "EMPTY"], 2, "holds no prompt. Name a UTF-8 text file with one prompt a line."),
    (["serve", "ENGINE", "--api-keys", "EMPTY"], 2, "holds no key. Name a UTF-8 text file with one key a line."),
    (["serve", "ENGINE", "--request-timeout-s", "nan"], 2, "request_timeout_s=nan is refused. Use seconds, above 0"),
    (["serve", "ENGINE", "--load-timeout-s", "-5"], 2, "load_timeout_s=-5.0 is refused. Use seconds, above 0"),
    (["serve", "ENGINE", "--default-max-tokens", "-5"], 2, "default_max_tokens=-5 is refused. Use a whole number from 1"),
    (["eval", "perplexity", "ENGINE", "--text", "NOWHERE"], 2, "NOWHERE cannot be read: No such file or directory. Name a UTF-8"),
    (["eval", "perplexity", "ENGINE", "--text", "LATIN"], 2, "Name a UTF-8 text file."),
    (["eval", "perplexity", "ENGINE", "--text", "LATIN", "--device", "tpu"], 2, "device='tpu' is refused. Use one of: cpu, cuda."),
    (["package", "lmi", "ENGINE", "-o", "NOWHERE/model.tar"], 2, "is not a directory. Create it"),
    (["triton", "fill", "LATIN", "a:b"], 2, "cannot be read"),
    (["triton", "input-data", "--requests", "-1"], 2, "requests=-1 is refused. Use a whole number from 1"),
    (["triton", "input-data", "--vocab-size", "2"], 2, "vocab_size=2 is refused. Use a whole number from 4"),
    (["triton", "identity", "--batch_size", "0"], 2, "batch_size=0 is refused. Use a whole number from 1"),
    (["triton", "identity", "--num_runs", "0"], 2, "num_runs=0 is refused. Use a whole number from 1"),
    (["triton", "sweep", "--seconds", "0"], 2, "--seconds 0.0 is refused. Use seconds, above 0"),
    (["client", "hi", "-u", "http://127.0.0.1:8001"], 2, "url='http://127.0.0.1:8001' is refused. Use host:port"),
    (["triton", "identity", "-u", "localhost:65536"], 2, "url='localhost:65536' is refused."),
    (["client", "hi", "-i", "http", "-u", "127.0.0.1:1"], 1, "127.0.0.1:1 does not answer: Connection refused. Start it"),
    (["client", "--model-name", "tensorrt_llm", "--input-tokens-csv", "NOWHERE"], 2, "Write token ids with commas between them."),
    (["build", "NOWHERE", "-o", "OUT", "--quantize", "int9"], 2, "unknown quantization 'int9'. Use one of: "),
    (["generate", "NOWHERE", "hi", "--quantize", "int9"], 2, "unknown quantization 'int9'. Use one of: "),
    (["serve", "NOWHERE", "--quantize", "int9"], 2, "unknown quantization 'int9'. Use one of: "),
    (["serve", "NOWHERE", "--tool-parser", "foo"], 2, "unknown tool parser 'foo'. Use one of: "),
    (["serve", "NOWHERE", "--reasoning-parser", "foo"], 2, "unknown reasoning parser 'foo'. Use one of: "),
    (["serve", "NOWHERE", "--protocol", "foo"], 2, "unknown protocol 'foo'. Use one of: "),
    (["serve", "ENGINE", "--max-batch-size", "1000"], 2, "max_batch_size=1000 is above the engine's 8. Build the engine with"),
    (["serve", "ENGINE", "--dtype", "float16"], 2, "is an engine, and only a build can change it. Leave it out, or name the checkpoint."),
    (["serve", "ENGINE", "--api-key", "short"], 2, "an API key is refused. Use at least 8 printable ASCII characters."),
    (["completion", "tcsh"], 2, "shell='tcsh' is refused. Use one of: bash, zsh, fish."),
    (["rm", "no-such-engine"], 2, "'no-such-engine' is not the name or id of a cached engine. See stoker list."),
    (["client", "hi", "-u", "127.0.0.1:1"], 1, "127.0.0.1:1 does not answer: no grpc server listens there. Start"),
    (["launch", "--model_repo", "LMI"], 2, "is of the format lmi. Serve it: stoker serve"),
]


@pytest.mark.parametrize(("args", "status", "says"), FAILURES, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None)
def test_an_error_is_one_line_with_the_cure(args: list[str], status: int, says: str, tiny_engine: Path, tmp_path: Path, run: Run) -> None:
    names = {
        "NOWHERE": "NOWHERE",
        "OUT": "out",
        "EMPTY": "empty.txt",
        "LATIN": "latin.txt",
        "LMI": "lmi",
        "DAMAGED": "damaged",
        "TRACE": "trace",
    }
    places = {"ENGINE": str(tiny_engine), **{name: str(tmp_path / place) for name, place in names.items()}}
    places["STEPS"] = str(Path(__file__).parents[2] / "benchmarks" / "results" / "h200_llama8b_fp8_step_times.json")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 110, "output_length": 9, "hash_ids": [1]}\n')
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "lla')
    (tmp_path / "lmi").mkdir()
    (tmp_path / "lmi" / "serving.properties").write_text(f"option.model_id={tiny_engine}\n")
    exit_status, error = run(*(re.sub("^[A-Z]+", lambda match: places.get(match[0], match[0]), arg) for arg in args))
    assert exit_status == status, error
    assert error.startswith("stoker: ")
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("table", [[], ["export"]])
def test_a_table_of_commands_without_a_command_prints_its_help(table: list[str], run: Run) -> None:
    status, shown = run(*table)
    assert status == 2 and shown.startswith("Usage: " + " ".join(["stoker", *table])) and "$ stoker" in shown


def test_a_traceback_is_printed_only_at_log_level_debug(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "none")
    assert "Traceback" not in run("inspect", missing)[1]
    monkeypatch.setenv("STOKER_LOG", "debug")
    assert "Traceback" in run("inspect", missing)[1]
    monkeypatch.setenv("STOKER_LOG", "loud")
    assert run("inspect", missing) == (2, "stoker: STOKER_LOG='LOUD' is refused. Use one of: DEBUG, INFO, WARNING, ERROR.\n")


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("4,2", 4), ("0", None), ("-1", None), ("all", None), ("9" * 5000, None)]
)  # fmt: skip
def test_the_thread_count_of_the_environment_is_a_number(value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_THREADS", value)
    if threads is not None:
        assert env.num_threads() == threads
        return
    with pytest.raises(ConfigError, match=r"STOKER_THREADS=.* is refused\. Use a whole number from 1 to 4096, or unset it\."):
        env.num_threads()


def test_brackets_in_a_path_are_not_read_as_markup(tiny_engine: Path, tmp_path: Path) -> None:
    engine = tmp_path / "[bold]" / "en[/gine]"
    shutil.copytree(tiny_engine, engine)
    assert str(engine) in stoker("inspect", str(engine), COLUMNS="400").stdout
    shown = stoker("build", str(tiny_engine.parent / "checkpoint"), "-o", str(tmp_path / "[red]"), "--verify", "none", COLUMNS="40").stderr
    assert shown.splitlines()[-1] == f"Serve it: stoker serve {tmp_path / '[red]'}"  # one line, so that it can be copied


def test_doctor_reports_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = stoker("doctor", "--offline", "--json", STOKER_CACHE=str(tmp_path / "file"))
    found = {line["what"]: line for line in json.loads(done.stdout)}
    assert found["cache"] == {
        "state": "note", "what": "cache", "says": f"{tmp_path / 'file'} cannot be written. Name another with STOKER_CACHE."
    }  # fmt: skip


def test_a_missing_file_of_an_engine_is_named(tiny_engine: Path, tmp_path: Path, run: Run) -> None:
    for file in tiny_engine.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "rank0.safetensors").unlink()
    status, error = run("generate", str(tmp_path), "hi")
    assert status == 1
    assert "rank0.safetensors" in error


def test_ctrl_c_ends_a_stream_quietly(tiny_engine: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "generate", str(tiny_engine), "hello", "--max-tokens", "64", "--ignore-eos"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=30)[1]
    assert process.returncode in (0, 130)  # 0 when the answer was complete before the signal
    assert error == b""


def test_sigterm_ends_the_server_that_a_benchmark_started(tiny_engine: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "bench", "serving", str(tiny_engine), "--rounds", "1000", "--output-len", "8", "--input-len", "8"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "STOKER_LOG": "info"},
    )  # fmt: skip
    assert process.stderr is not None
    assert any(b"Started HTTPService" in line for line in process.stderr)
    children = _children(process.pid)
    assert children
    process.send_signal(signal.SIGTERM)
    process.stderr.read()  # returns when the last process that holds the pipe has ended
    assert process.wait() == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def test_a_full_disk_is_reported_with_a_cure(tiny_engine: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "stoker", "inspect", str(tiny_engine)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("stoker: [Errno 28] No space left on device. Free space on that disk, or write to another: ")


def test_doctor_reports_every_check() -> None:
    done = stoker("doctor", "--offline", "--json")
    found = {line["what"]: line for line in json.loads(done.stdout)}
    assert done.returncode == 0
    machine = {"Python", "torch", "GPU", "triton", "processor", "CPU kernels", "memory", "cache", "port 8000"}
    assert machine | {"grpc", "xgrammar", "boto3", "opentelemetry.sdk"} == set(found)
    assert found["torch"]["state"] == "ok"
    assert all(line["state"] in ("ok", "note") and line["says"] for line in found.values())
