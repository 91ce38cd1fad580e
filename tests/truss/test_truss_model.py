"""The exported model.py: what it forwards to a Stoker server, and the server that it starts. The oracle is Stoker's own endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import live_http
import pytest
from fastapi import HTTPException, Request
from process_tree import processes_below, runs
from starlette.responses import Response, StreamingResponse
from triton_server import TEXT, RunningServer, endless, running, until

from stoker.deploy.deployment import EngineInfo
from stoker.deploy.truss.export import export_truss
from stoker.deploy.truss.load import PROTOCOLS, load_truss
from stoker.runtime.request import ErrorInfo

TRUSS = {"protocols": PROTOCOLS}
PREDICT = "/v1/models/model:predict"
JSON = "application/json"
MSGPACK = "application/octet-stream"


@pytest.fixture(scope="module")
def folder(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("truss") / "exported"
    export_truss(EngineInfo(path=str(tiny_engine), architecture="LlamaForCausalLM", vocab_size=320), out, {"accelerator": "none"})
    return out


def module_of(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(**TRUSS) as started:
        yield started


@pytest.fixture
def model(folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded_model(folder, server, monkeypatch)


def loaded_model(folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STOKER_ADDRESS", f"http://{server.http}")
    model = module_of(folder).Model(config={}, data_dir="data", secrets={}, environment=None)
    assert not model.is_healthy()
    model.load()
    assert model.is_healthy()
    return model


def request_of(body: bytes, headers: dict[str, str], connected_s: float = 60.0) -> Request:
    """A request as the server of truss passes it, whose client disconnects after `connected_s`."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    end = time.monotonic() + connected_s
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if time.monotonic() < end:
            await asyncio.sleep(connected_s)
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": PREDICT, "headers": raw, "query_string": b""}, receive)


async def content(response: Response) -> bytes:
    if isinstance(response, StreamingResponse):
        return b"".join([chunk if isinstance(chunk, bytes) else str(chunk).encode() async for chunk in response.body_iterator])
    return bytes(response.body)


BODIES: list[Any] = [
    {"prompt": "once"}, {"prompt": "once", "max_tokens": 3, "stream": False}, {"prompt": "once", "stop_words_list": ["fox", ""]},
    {"prompt": "", "max_tokens": 2}, {"prompt": "x", "top_p": 0.5, "min_p": 0.1, "early_stopping": True, "request_id": "7"},
    {"prompt": "x", "eos_token_id": 2},
    {"prompt": "x", "seed": -7, "top_k": -1}, {"prompt": "x", "ignore_eos": True}, {"prompt": "x", "stop": "quick"},
    {"prompt": "x", "model": "tiny", "max_tokens": 3}, {"prompt": "x", "model": "tiny", "max_tokens": "many"},
    {"messages": [{"role": "user", "content": "hi"}]}, {"messages": "hi"}, {"prompt": "x", "messages": []}, {}, [1], None, "text",
    {"prompt": "x", "speed": 1}, {"prompt": "x", "max_tokens": 3.5}, {"prompt": "x", "max_tokens": 1 << 40}, {"prompt": 3},
    {"prompt": "x", "stream": "no"}, {"prompt": "x", "stop_words_list": [3]}, {"prompt": "x", "beam_width": 9}, {"prompt": "x" * 500},
]  # fmt: skip
RAW = [b"", b"{", b'{"prompt": NaN}', b"\xff", '{"prompt": "once", "max_tokens": 2}'.encode("utf-16"), b'{"prompt": "\\ud800"}']


@pytest.mark.parametrize("accept", ["*/*", JSON])
async def test_the_response_is_that_of_the_endpoint(model: Any, server: RunningServer, accept: str) -> None:
    """Every body: status, content type and content."""
    statuses = set()
    async with httpx.AsyncClient(base_url=f"http://{server.http}") as client:
        for body in [*(json.dumps(body).encode() for body in BODIES), *RAW]:
            headers = {"content-type": JSON, "accept": accept}
            direct = await client.post(PREDICT, content=body, headers=headers)
            response = await model.predict(request_of(body, headers))
            assert (response.status_code, response.headers["content-type"]) == (direct.status_code, direct.headers["content-type"]), body
            if response.status_code == 200 and b"model" in body:  # OpenAI's responses contain an id and a time
                assert json.loads(await content(response))["choices"] == direct.json()["choices"]
            else:
                assert await content(response) == direct.content, body
            statuses.add(response.status_code)
    assert statuses == {200, 400}


async def test_msgpack_requests_get_msgpack(model: Any, server: RunningServer) -> None:
    import msgspec

    body = msgspec.msgpack.encode({"prompt": "once", "stream": False})
    response = await model.predict(request_of(body, {"content-type": MSGPACK}))
    assert response.headers["content-type"] == MSGPACK
    assert msgspec.msgpack.decode(await content(response)) == {"text": TEXT}
    refused = await model.predict(request_of(b"\xc1", {"content-type": MSGPACK}))
    assert refused.status_code == 400 and b"Unpack failed" in await content(refused)


async def test_openai_requests(model: Any) -> None:
    headers = {"content-type": JSON}
    streamed = await model.completions(request_of(b'{"prompt": "x", "stream": true, "max_tokens": 30}', headers))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert (await content(streamed)).endswith(b"data: [DONE]\n\n")
    chat = await model.chat_completions(request_of(b'{"messages": [{"role": "user", "content": "hi"}]}', headers))
    assert chat.status_code == 400 and b"no chat template" in await content(chat)
    made = await model.responses(request_of(b'{"input": 3}', headers))
    assert made.status_code == 400 and json.loads(await content(made))["error"]["param"] == "input"
    message = await model.messages(request_of(b'{"max_tokens": 3}', headers))
    assert message.status_code == 400 and json.loads(await content(message))["type"] == "error"


async def test_a_disconnected_client_cancels_its_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"content-type": JSON}
    with running(endless, step_s=0.001, limits={"max_output_len": 100_000}, **TRUSS) as server:
        model = loaded_model(folder, server, monkeypatch)
        streamed = await model.predict(request_of(b'{"prompt": "x", "max_tokens": 90000}', headers))
        await anext(streamed.body_iterator)
        assert server.executor.running
        await streamed.body_iterator.aclose()
        until(lambda: not server.executor.running)
        whole = b'{"prompt": "x", "max_tokens": 90000, "stream": false}'
        with pytest.raises(HTTPException) as caught:
            await model.predict(request_of(whole, headers, connected_s=0.05))
        assert caught.value.status_code == 499
        await live_http.until(lambda: not server.executor.running)  # lets the cancelled task close its connection


async def test_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(lambda request, index: ErrorInfo("step_failed", "the step failed."), **TRUSS) as server:
        model = loaded_model(folder, server, monkeypatch)
        failed = await model.predict(request_of(b'{"prompt": "x"}', {"content-type": JSON}))
        assert failed.status_code == 500 and b"error" in await content(failed)
    with pytest.raises(HTTPException, match="the Stoker server is unavailable") as caught:
        await model.predict(request_of(b'{"prompt": "x"}', {"content-type": JSON}))
    assert caught.value.status_code == 503


def test_the_server_reads_the_configuration(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that model.py writes for its server requests the same deployment as the Truss, also after the user has changed it."""
    import yaml

    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 0)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model_metadata"] |= {
        "tags": ["force-legacy-api-non-openai-compatible"],
        "max_tokens_counts_prompt": True,
        "note": 'a "b": #c',
        "since": date(2024, 1, 1),
    }
    resources = {"accelerator": None, "use_gpu": False, "cpu": "1", "memory": "2Gi"}  # as the server of truss passes them
    module_of(folder)._write_folder(tmp_path, config | {"resources": resources, "unknown": 1})
    written = load_truss(tmp_path, {})
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.yaml").write_text(yaml.safe_dump(config))
    (changed / "packages").symlink_to(folder / "packages")
    truss = load_truss(changed, {})
    assert (written.source, written.tokenizer, written.runtime, written.server) == (
        truss.source,
        truss.tokenizer,
        truss.runtime,
        truss.server,
    )
    assert truss.runtime.device == "cpu" and truss.server.options.legacy  # type: ignore[union-attr]


PARENT = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("exported_model", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.Model(config={"model_name": "tiny", "model_metadata": METADATA, "resources": {"use_gpu": False}})
model.load()
print("process", model._process.pid, flush=True)
sys.stdin.read()
"""


def test_no_process_remains_when_the_parent_is_killed(folder: Path) -> None:
    import yaml

    metadata = yaml.safe_load((folder / "config.yaml").read_text())["model_metadata"]
    environment = {name: value for name, value in os.environ.items() if name != "STOKER_ADDRESS"} | {"STOKER_API_KEY": "of-another-server"}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("METADATA", repr(metadata)), folder / "model" / "model.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pid = next(line for line in parent.stdout if line.startswith("process ")).split()[1]  # the server writes to the same pipe
        started = processes_below(int(pid))
        assert len(started) == 3 and all(map(runs, started)), "supervisor, executor and frontend"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not any(map(runs, started)), seconds=50)


def test_a_server_that_ends_or_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_ADDRESS", raising=False)
    code = (
        "import sys; from http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    model = module_of(folder).Model()
    monkeypatch.setattr(model, "_command", lambda folder, port: [sys.executable, "-c", code, str(port)])
    model.load()
    try:
        assert model.is_healthy()
    finally:
        model._stop()
    assert not model.is_healthy() and not Path(model._folder.name).exists()
    monkeypatch.setattr(model, "_command", lambda folder, port: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="ended with status 3"):
        model.load()
