"""Explicit model control of a whole server: loading, unloading and reloading while requests run, and engines that cannot be loaded."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as tgrpc
from test_triton_clients import tensors
from triton_server import running, until
from tritonserver_process import program, repository, started

from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models

__all__ = ["program", "repository"]  # fixtures


def test_models_are_loaded_unloaded_and_reloaded_while_requests_run(
    repository: Callable[[int], Path], program: Path, tmp_path: Path
) -> None:
    """Explicit mode with two frontends. Unloading drains, ends the executor, and a load starts it with the present files."""
    repo = tmp_path / "repo"
    shutil.copytree(repository(1), repo)
    address = ["--http-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command = [str(program), f"--model-repository={repo}", *address, "--model-control-mode=explicit", "--load-model=ensemble"]
    with started(command) as (addresses, process, _), httpx.Client(base_url=f"http://{addresses['HTTPService']}", timeout=60) as http:
        generate = {"text_input": "the quick", "max_tokens": 100, "end_id": -1}
        whole = http.post("/v2/models/ensemble/generate", json=generate).json()["text_output"]
        assert states(http) == {
            **dict.fromkeys(("ensemble", "postprocessing", "preprocessing", "tensorrt_llm"), "READY"),
            "tensorrt_llm_bls": "UNAVAILABLE",
        }
        (executor,) = executors(process)
        # A stream that runs while its model is unloaded receives its whole answer; new requests are refused at once.
        with http.stream("POST", "/v2/models/ensemble/generate_stream", json={**generate, "stream": True}) as stream:
            events = stream.iter_lines()
            first = next(events)
            assert http.post("/v2/repository/models/ensemble/unload", json={"parameters": {"unload_dependents": True}}).status_code == 200
            for _ in range(6):  # each frontend
                refused = httpx.post(f"{http.base_url}/v2/models/ensemble/generate", json=generate, timeout=60)
                assert refused.status_code == 503 and "no available versions" in refused.json()["error"]
            parts = [json.loads(line[6:]) for line in [first, *events] if line]
        assert "".join(part["text_output"] for part in parts) == whole.removeprefix("the quick")
        until(lambda: set(states(http).values()) == {"UNAVAILABLE"}, 60)
        assert not Path(f"/proc/{executor}").exists() and executors(process) == [], "the memory of the engine is free"
        assert http.get("/metrics").status_code == 200 and http.get("/v2/models/stats").status_code == 200
        assert http.get("/v2/health/ready").status_code == 200 and http.get("/v2/models/ensemble/ready").status_code == 400
        # The files have changed: the load applies them, in all frontends.
        config = repo / "ensemble" / "config.pbtxt"
        config.write_text(re.sub(r"max_batch_size: \d+", "max_batch_size: 7", config.read_text()))
        assert http.post("/v2/repository/models/ensemble/load").status_code == 200
        for _ in range(6):
            assert httpx.get(f"{http.base_url}/v2/models/ensemble/config", timeout=60).json()["max_batch_size"] == 7
            answer = httpx.post(f"{http.base_url}/v2/models/ensemble/generate", json=generate, timeout=60).json()
            assert answer["text_output"] == whole
        (executor,) = executors(process)
        # A load without changes keeps the executor, and one with other settings of the runtime replaces it.
        assert http.post("/v2/repository/models/tensorrt_llm/load").status_code == 200 and executors(process) == [executor]
        llm = repo / "tensorrt_llm" / "config.pbtxt"
        written = llm.read_text()
        llm.write_text(written.replace('"4096"', '"2048"'))
        assert http.post("/v2/repository/models/tensorrt_llm/load").status_code == 200 and executors(process) != [executor]
        assert http.post("/v2/models/ensemble/generate", json=generate).json()["text_output"] == whole
        # Files that cannot be served are an error, and the models that run are not affected.
        llm.write_text("max_batch_size: many")
        failed = http.post("/v2/repository/models/tensorrt_llm/load")
        assert (
            failed.status_code == 400 and "failed to load 'tensorrt_llm', " in failed.json()["error"] and "many" in failed.json()["error"]
        )
        assert http.post("/v2/models/ensemble/generate", json=generate).json()["text_output"] == whole
    assert process.returncode == 0


def test_an_engine_that_cannot_be_loaded_leaves_the_server(repository: Callable[[int], Path], program: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(repository(1), repo)
    llm = repo / "tensorrt_llm" / "config.pbtxt"
    written = llm.read_text()
    llm.write_text(written.replace('"4096"', '"99999999999"'))
    address = ["--http-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command = [str(program), f"--model-repository={repo}", *address, "--model-control-mode=explicit", "--load-model=*"]
    with (
        started([*command, "--exit-on-error=false"]) as (addresses, process, lines),
        httpx.Client(base_url=f"http://{addresses['HTTPService']}", timeout=60) as http,
    ):
        assert http.get("/v2/health/live").status_code == 200 and http.get("/v2/health/ready").status_code == 503
        rows = {row["name"]: row for row in http.post("/v2/repository/index").json()}
        assert rows["tensorrt_llm"]["state"] == "UNAVAILABLE" and "kv_cache_tokens" in rows["tensorrt_llm"]["reason"]
        assert http.post("/v2/models/ensemble/generate", json={"text_input": "a", "max_tokens": 1}).status_code == 503
        assert "kv_cache_tokens" in http.get("/health/ready").text
        failed = http.post("/v2/repository/models/tensorrt_llm/load")
        assert failed.status_code == 400 and "failed to load 'tensorrt_llm', kv_cache_tokens" in failed.json()["error"], failed.text
        llm.write_text(written)
        assert http.post("/v2/repository/models/tensorrt_llm/load").status_code == 200
        assert http.post("/v2/models/ensemble/generate", json={"text_input": "a", "max_tokens": 1}).status_code == 200
    assert process.returncode == 0 and any("The server stays without the model" in line for line in lines)


def states(http: httpx.Client) -> dict[str, str]:
    return {row["name"]: row["state"] for row in http.post("/v2/repository/index").json()}


def executors(process: subprocess.Popen[str]) -> list[str]:
    """The process ids of the executors of a server."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [child for child in children if b"processes.executor" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_an_unload_waits_for_requests_from_before_a_reload() -> None:
    """Meanwhile the model is reloaded and then unloaded: its state is UNLOADING until the client cancels the request."""
    options = TritonOptions(models=default_models(), unary=True, model_control="explicit")
    inputs = {"IN": np.arange(2, dtype=np.int32), "DELAY": np.array([0, 60_000], np.uint32), "WAIT": np.zeros(1, np.uint32)}
    with running(options=options, test_models=True) as server, httpx.Client(base_url=f"http://{server.http}") as http:
        client = tgrpc.InferenceServerClient(server.grpc)
        results: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer("repeat_int32", tensors(tgrpc, **inputs))
        assert results.get(timeout=10).as_numpy("OUT").item() == 0
        client.load_model("repeat_int32")
        client.unload_model("repeat_int32")
        assert states(http)["repeat_int32"] == "UNLOADING" and not client.is_model_ready("repeat_int32")
        client.async_stream_infer("repeat_int32", tensors(tgrpc, **inputs))
        assert "has no available versions" in str(results.get(timeout=10)), "a new request is refused"
        client.stop_stream(cancel_requests=True)
        until(lambda: states(http)["repeat_int32"] == "UNAVAILABLE")
        client.load_model("repeat_int32")
        assert client.is_model_ready("repeat_int32")
        client.close()
