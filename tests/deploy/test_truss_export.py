"""An engine written as a Truss: read back, and its model.py against a server that records what it is asked."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.deploy import truss
from stoker.deploy.deployment import EngineInfo, EngineSource


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(truss, "visible_gpus", lambda environment: 0)
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text("{}")
    (engine / "rank0.safetensors").write_bytes(b"weights")
    info = EngineInfo(path=str(engine), architecture="LlamaForCausalLM", vocab_size=10, mapping=Mapping(tensor_parallel=2))
    written = truss.export(info, tmp_path / "truss", {"model_name": "mine", "accelerator": "H100"})
    assert all(path.is_file() for path in written) and len(written) == 5
    return tmp_path / "truss"


def test_export_is_read_back(exported: Path) -> None:
    assert truss.recognise(exported)
    deployment = truss.load(exported, {})
    engine = exported / "packages" / "engine"
    assert deployment.source == EngineSource(location=str(engine), token_secret="hf_access_token", mapping=Mapping(tensor_parallel=2))
    assert (deployment.server.model_name, deployment.tokenizer) == ("mine", str(engine))
    assert (engine / "rank0.safetensors").read_bytes() == b"weights"
    assert yaml.safe_load((exported / "config.yaml").read_text())["resources"]["accelerator"] == "H100:2"


def test_export_refuses(exported: Path, tmp_path: Path) -> None:
    info = EngineInfo(path=str(tmp_path / "engine"), architecture="x", vocab_size=1)
    with pytest.raises(ConfigError, match="is not empty"):
        truss.export(info, exported, {})
    with pytest.raises(ConfigError, match="unknown option speed"):
        truss.export(info, tmp_path / "new", {"speed": "high"})


class Server(ThreadingHTTPServer):
    asked: list[tuple[str, Any]]
    gone: threading.Event


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server: Server

        def do_GET(self) -> None:
            self.reply(200, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.path, body))
            if body.get("bad"):
                self.reply(400, b'{"error": "prompt is missing"}')
            elif body.get("stream", True):
                self.stream(body)
            else:
                self.reply(200, b'{"text": "whole"}')

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def stream(self, body: dict) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for text in body.get("chunks", ()):
                    self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
                while body.get("endless"):
                    self.wfile.write(b"1\r\nx\r\n")
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                self.server.gone.set()

        def log_message(self, *args: Any) -> None:
            return None

    server = Server(("127.0.0.1", 0), Handler)
    server.asked, server.gone, server.daemon_threads = [], threading.Event(), True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(exported: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STOKER_ADDRESS", f"http://127.0.0.1:{server.server_port}")
    loaded = model_class(exported)(config={}, data_dir="data", secrets={}, environment=None)
    assert not loaded.is_healthy()
    loaded.load()
    assert loaded.is_healthy()
    return loaded


def model_class(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model


async def test_predict_streams_plain_text(model: Any, server: Server) -> None:
    chunks = await model.predict({"prompt": "hi", "chunks": ["Once", " upon", " a time"]})
    assert b"".join([chunk async for chunk in chunks]) == b"Once upon a time"
    assert server.asked[-1][0] == "/v1/models/model:predict" and server.asked[-1][1]["prompt"] == "hi"


async def test_predict_whole(model: Any) -> None:
    assert await model.predict({"prompt": "hi", "stream": False}) == {"text": "whole"}


@pytest.mark.parametrize("method, route", [("chat_completions", "/v1/chat/completions"), ("completions", "/v1/completions")])
async def test_openai_methods(model: Any, server: Server, method: str, route: str) -> None:
    assert await getattr(model, method)({"stream": False}) == {"text": "whole"}
    assert server.asked[-1][0] == route


async def test_errors_keep_their_status(model: Any) -> None:
    from fastapi import HTTPException

    with pytest.raises(HTTPException) as caught:
        await model.predict({"bad": True})
    assert (caught.value.status_code, caught.value.detail) == (400, "prompt is missing")


async def test_leaving_early_closes_the_connection(model: Any, server: Server) -> None:
    chunks = await model.predict({"endless": True})
    assert (await anext(chunks)).startswith(b"x")
    await chunks.aclose()
    assert server.gone.wait(10)


def test_server_is_started_and_stopped(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_ADDRESS", raising=False)
    code = (
        "import sys; from http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    model = model_class(exported)()
    monkeypatch.setattr(model, "_command", lambda port: [sys.executable, "-c", code, str(port)])
    model.load()
    try:
        assert model.is_healthy()
    finally:
        model._stop()
    assert not model.is_healthy()


def test_server_that_dies_is_told(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_ADDRESS", raising=False)
    model = model_class(exported)()
    monkeypatch.setattr(model, "_command", lambda port: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="ended with status 3"):
        model.load()
