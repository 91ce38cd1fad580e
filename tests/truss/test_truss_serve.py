"""A Truss folder from its configuration to a response: built once for all replicas at start-up, served on Truss's endpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from stoker.cli.server_process import running_server
from stoker.engine.reader import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = (Path(__file__).parent / "documents" / "build_and_serve.yaml").read_text().split("  serve:")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build section of the documentation with a local checkpoint, and without the quantization, whose calibration takes long."""
    import tiny

    checkpoint = tiny.save(tiny.model(max_position_embeddings=4096), tmp_path_factory.mktemp("checkpoint"))
    out = tmp_path_factory.mktemp("truss")
    (out / "config.yaml").write_text(SEED.replace("decaplusplus/llama-7b-hf", str(checkpoint)).replace("WEIGHTS_KV_INT8", "NO_QUANT"))
    return out


def test_replicas_build_once_and_the_engine_is_served(
    folder: Path, tmp_path: Path, new_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(new_cache(tmp_path / "cache")))
    program = Path(__file__).parent / "replicas.py"
    done = subprocess.run([sys.executable, program, folder, "5"], capture_output=True, text=True, timeout=100, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    replicas = [line.split() for line in done.stdout.splitlines()]
    assert sorted(origin for _, origin in replicas) == ["built", *["found"] * 4], "a build reports the stage `weights`"
    (engine,) = {Path(path) for path, _ in replicas}
    config = Engine.open(engine).config
    assert (config.limits.max_input_len, config.limits.max_output_len, config.limits.max_beam_width) == (2048, 256, 4)
    with running_server(folder, ["--kv-cache-tokens", "4096"]) as url:
        body = {"prompt": "the quick brown", "max_tokens": 8}
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/v1/models/model").json() == {}
            whole = client.post("/v1/models/model:predict", json={**body, "stream": False}).json()["text"]
            answer = client.post("/v1/models/model:predict", json=body)
            assert (answer.text, answer.headers["content-type"]) == (whole, "application/octet-stream")
            assert client.post("/v1/models/model:predict", json={**body, "beam_width": 4}).status_code == 200
