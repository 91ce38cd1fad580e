"""Commands run a model of any location: the engine is built once, cached, and named after its checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port
from local_hub import local_hub

from stoker import LLM, SamplingParams
from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.deploy.build_settings import BuildSettings
from stoker.deploy.local_engine import find_engine
from stoker.deploy.model_name import model_name_of
from stoker.engine.reader import Engine

ANSWER = ["--max-tokens", "8", "--ignore-eos"]


@pytest.fixture(scope="module")
def checkpoint(tiny_engine: Path) -> Path:
    return tiny_engine.parent / "checkpoint"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[Path], Path]) -> Path:
    """STOKER_CACHE of this module, so that each engine is built once."""
    return new_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # engines for the CPU, also on a machine with a GPU


@pytest.fixture(scope="module")
def answer(tiny_engine: Path) -> str:
    """The greedy answer of the engine that the fixture built itself."""
    with LLM(tiny_engine, kv_cache_tokens=1024) as llm:
        return llm.generate("the quick", SamplingParams(max_tokens=8, ignore_eos=True)).choices[0].text


def engines_in(cache: Path) -> list[Path]:
    return sorted(path.parent for path in (cache / "engines").glob("*/config.json"))


def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[str, str]:
    """What a command, which must succeed, prints in this process: standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["stoker", *map(str, args)])
    capfd.readouterr()
    status = main()
    printed = capfd.readouterr()
    assert status == 0, printed.err
    return printed.out, printed.err


def test_a_checkpoint_is_built_once_for_all_commands(
    checkpoint: Path, cache: Path, answer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, progress = run(capfd, monkeypatch, "generate", checkpoint, "the quick", *ANSWER)
    assert output == answer + "\n"
    assert {"stoker: weights: 100 %", "stoker: verify: 100 %"} <= set(progress.splitlines())
    (engine,) = engines_in(cache)
    assert json.loads(run(capfd, monkeypatch, "inspect", checkpoint, "--json")[0])["checkpoint"]["name"] == "checkpoint"
    (tmp_path / "text").write_text("the quick brown fox " * 9)
    scored = run(capfd, monkeypatch, "eval", "perplexity", checkpoint, "--text", tmp_path / "text", "--window", "32", "--json")[0]
    assert json.loads(scored)["tokens"] > 0
    timed, silent = run(capfd, monkeypatch, "bench", "throughput", checkpoint, "--requests", "2", "--input-len", "8", "--output-len", "4")
    assert "output tokens/s" in timed and silent == ""
    assert engines_in(cache) == [engine]
    assert model_name_of(engine) == "checkpoint"


def test_a_hub_id_is_fetched_and_built(checkpoint: Path, answer: str, tmp_path: Path, new_cache: Callable[[Path], Path]) -> None:
    with local_hub({"acme/tiny-llama": checkpoint}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path), "STOKER_CACHE": str(new_cache(tmp_path / "cache"))}
        command = [sys.executable, "-m", "stoker", "generate", "acme/tiny-llama", "the quick", *ANSWER]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    assert done.stdout == answer + "\n", done.stderr
    assert "stoker: acme/tiny-llama: 100 %" in done.stderr.splitlines()
    (engine,) = engines_in(tmp_path / "cache")
    assert Engine.open(engine).config.checkpoint.name == "acme/tiny-llama"
    assert model_name_of(engine) == "tiny-llama"
    snapshot = next((tmp_path / "hub" / "models--acme--tiny-llama" / "snapshots").iterdir())
    assert model_name_of(snapshot) == "tiny-llama"


def test_a_server_answers_while_its_model_is_fetched(checkpoint: Path, tmp_path: Path) -> None:
    with local_hub({"acme/tiny-llama": checkpoint}) as hub:
        hub.weights_may_be_sent.clear()
        environment = {**os.environ, **hub.environment(tmp_path), "STOKER_CACHE": str(tmp_path / "cache")}
        port = free_port()
        command = [sys.executable, "-m", "stoker", "serve", "acme/tiny-llama", "--port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr is not None
            try:
                assert any("acme/tiny-llama: " in line for line in process.stderr)  # a small file has arrived, the weights have not
                ping = httpx.get(f"http://127.0.0.1:{port}/ping", timeout=30)
                while ping.json()["tiny-llama"]["reason"] == "being fetched and built":  # the frontend receives the progress after the log
                    ping = httpx.get(f"http://127.0.0.1:{port}/ping", timeout=30)
                assert (ping.status_code, ping.json()["tiny-llama"]["status"]) == (503, "Loading")
                assert ping.json()["tiny-llama"]["reason"].startswith("acme/tiny-llama: ")
                assert httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=30).status_code == 200
            finally:
                process.kill()
                hub.weights_may_be_sent.set()


@pytest.mark.parametrize("kind", ["archive", "gguf"])
def test_other_locations(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    if kind == "archive":
        location, name = tmp_path / "Tiny-1.tar.gz", "Tiny-1.tar.gz"
        with tarfile.open(location, "w:gz") as tar:
            tar.add(checkpoint, arcname=".")
    else:
        import gguf_files
        import tiny

        location, name = gguf_files.write(tmp_path / "tiny.Q8.gguf", tiny.model()), "tiny.Q8.gguf"
    stages: list[str] = []
    # Other limits than those of the tests above: the content of the archive is that of the folder, whose engine would be found.
    build = BuildSettings(max_input_len=33)
    engine = find_engine(str(location), runtime=None, build=build, progress=lambda stage, done, total: stages.append(stage))
    assert Engine.open(engine).config.checkpoint.name == name
    assert model_name_of(engine) == name.removesuffix(".tar.gz").removesuffix(".gguf")
    assert {"weights", "verify"} <= set(stages)
    assert find_engine(engine, runtime=RuntimeConfig()) == engine


def test_settings_of_the_build_and_of_the_run_determine_the_engine(checkpoint: Path) -> None:
    build = BuildSettings(quantization="int8", max_input_len=32)
    config = Engine.open(find_engine(checkpoint, runtime=RuntimeConfig(max_batch_size=300), build=build)).config
    assert (config.recipe.name, config.limits.max_input_len, config.limits.max_batch_size) == ("WEIGHTS_ONLY_INT8", 32, 300)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"build": BuildSettings(quantization="int9")}, r"unknown quantization 'int9'\. Use one of: "),
    ({"runtime": RuntimeConfig(device="cuda")}, "device='cuda' is refused: no GPU is visible on this machine. Use --device cpu"),
    (
        {"runtime": RuntimeConfig(max_batch_size=1000)},
        r"max_batch_size=1000 is above the engine's 8\. Build the engine with --max-batch-size 1000",
    ),
    (
        {"build": BuildSettings(dtype="float16")},
        r"dtype=float16 is refused: .* is an engine, and only a build can change it\. Leave it out",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_wrong_settings_are_refused_before_anything_is_read(
    settings: dict[str, Any], message: str, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.deploy.runtime_checks.visible_gpus", lambda environment: 0)
    monkeypatch.setattr("stoker.deploy.local_engine.prepare_engine", lambda *args: pytest.fail("the engine was prepared"))
    with pytest.raises(ConfigError, match=message):
        find_engine(tiny_engine, **{"runtime": RuntimeConfig(), **settings})


def test_an_engine_for_a_gpu_is_inspected_but_not_run_without_one(
    tiny_engine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.deploy.runtime_checks.visible_gpus", lambda environment: 0)
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    config = json.loads((engine / "config.json").read_text())
    config["target"] = {"device": "cuda", "compute_capability": "9.0"}
    (engine / "config.json").write_text(json.dumps(config))
    assert json.loads(run(capfd, monkeypatch, "inspect", engine, "--json")[0])["target"]["device"] == "cuda"
    with pytest.raises(
        ConfigError, match=r"is an engine for cuda, and no GPU is visible on this machine\. Build an engine with --device cpu"
    ):
        find_engine(engine, runtime=RuntimeConfig())
