"""The exported model.py: its requests to a Stoker server over gRPC and HTTP, and its results. The oracle is Stoker's :predict endpoint."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import HTTPException
from triton_server import TEXT, RunningServer, endless, running, until

from stoker.base.errors import QueueFullError, RequestError, StokerError, UnavailableError
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.triton.export import five_models
from stoker.deploy.truss.export import export_truss
from stoker.runtime.request import ErrorInfo
from stoker.server.protocols.kserve.model_config import TritonOptions

OPTIONS = TritonOptions(
    models=five_models(EngineInfo(path="e", architecture="x", vocab_size=512), {"decoupled_mode": "true"}), unary=True, max_beam_width=4
)
PREDICT = "/v1/models/model:predict"


@pytest.fixture(scope="module")
def folder(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("truss") / "exported"
    export_truss(EngineInfo(path=str(tiny_engine), architecture="LlamaForCausalLM", vocab_size=320), out, {})
    return out


def model_class(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model


@pytest.mark.parametrize(
    "error", [RequestError("n", 0, "it must be positive"), QueueFullError(3, 2, 1.0), UnavailableError("it is unavailable.")]
)
def test_errors_of_a_stream_have_the_status_of_the_server(folder: Path, error: StokerError) -> None:
    """A gRPC stream reports errors without a status. model.py derives it from the words of the message."""
    http_error = model_class(folder).__init__.__globals__["_http_error"]
    assert http_error(str(error)).status_code == error.status


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(options=OPTIONS) as started:
        yield started


@pytest.fixture
def model(folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded_model(folder, server, monkeypatch)


def loaded_model(folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STOKER_ADDRESS", f"http://{server.http}")
    monkeypatch.setenv("STOKER_GRPC", server.grpc)
    model = model_class(folder)(config={}, data_dir="data", secrets={}, environment=None)
    assert not model.is_healthy()
    model.load()
    assert model.is_healthy()
    return model


class Request:
    """The part of Truss's request that `predict` uses: whether the client has disconnected, which it does after `chunks` chunks."""

    def __init__(self, chunks: int = 1 << 30) -> None:
        self._left = chunks

    async def is_disconnected(self) -> bool:
        self._left -= 1
        return self._left < 0


async def text(answer: AsyncGenerator[str | bytes, None]) -> str:
    return "".join([chunk.decode() if isinstance(chunk, bytes) else chunk async for chunk in answer])


async def test_streamed_text(model: Any) -> None:
    answer = await model.predict({"prompt": "hi"}, Request())
    chunks = [chunk async for chunk in answer]
    assert "".join(chunks) == TEXT and len(chunks) > 5 and all(isinstance(chunk, str) and chunk for chunk in chunks)
    assert await model.predict({"prompt": "hi", "stream": False}, Request()) == {"text": TEXT}


BODIES: list[dict[str, Any]] = [
    {}, {"max_tokens": 3}, {"max_new_tokens": 4}, {"stop_words_list": ["fox", ""]}, {"stop": "quick"}, {"bad_words_list": ["dog", "cat"]},
    {"bad_words_list": []}, {"repetition_penalty": 1.5}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "temperature": 0.25},
    {"temperature": 0}, {"random_seed": 7, "top_k": 2}, {"seed": 8, "top_k": 2}, {"min_length": 2}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"length_penalty": 0.5}, {"prompt": "", "max_tokens": 2},
    {"max_tokens": None}, {"stream": False, "stop_words_list": None},
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_same_request_and_response_as_the_endpoint(model: Any, server: RunningServer, body: dict[str, Any]) -> None:
    body = {"prompt": "once", **body}
    answer = await model.predict(body, Request())
    generated = answer["text"] if isinstance(answer, dict) else await text(answer)
    async with httpx.AsyncClient() as client:
        direct_answer = await client.post(f"http://{server.http}{PREDICT}", json=body)
    assert direct_answer.status_code == 200, direct_answer.text
    assert generated == (direct_answer.json()["text"] if body.get("stream") is False else direct_answer.text)
    exported, direct = server.executor.requests[-2:]
    assert list(exported.prompt_ids) == list(direct.prompt_ids)
    assert (exported.end_ids or exported.params.stop_token_ids) == (direct.end_ids or direct.params.stop_token_ids)
    assert exported.params == direct.params


async def test_ignore_eos(model: Any, server: RunningServer) -> None:
    await text(await model.predict({"prompt": "x", "ignore_eos": True}, Request()))
    request = server.executor.requests[-1]
    assert not request.end_ids and not request.params.stop_token_ids


@pytest.mark.parametrize("body, status, message", [
    ({"prompt": "x", "speed": 1}, 400, "speed=1 is refused"),
    ({"prompt": "x", "max_tokens": 3.5}, 400, "it must be a whole number"),
    ({"prompt": "x", "max_tokens": True}, 400, "max_tokens=True is refused"),
    ({"prompt": "x", "max_tokens": 1 << 40}, 400, "max_tokens=1099511627776 is refused"),
    ({"prompt": "x", "stream": "no"}, 400, "it must be true or false"),
    ({"prompt": 3}, 400, "it must be text"),
    ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens='many' is refused"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens=0 is refused"),
    ({"prompt": "x", "max_tokens": [1, 2]}, 400, "max_tokens=[1, 2] is refused"),
    ({"prompt": "x", "stop_words_list": [3]}, 400, "stop_words_list=3 is refused"),
    ({"prompt": "x", "beam_width": 9}, 400, "beam_width=9 is refused"),
    ({"prompt": "x" * 500}, 400, "prompt"),
    ({"messages": "hi"}, 400, "messages"),
    ([1], 400, "not an object"),
    ({}, 400, "prompt"),
])  # fmt: skip
async def test_invalid_bodies(model: Any, body: Any, status: int, message: str) -> None:
    with pytest.raises(HTTPException) as caught:
        await model.predict(body, Request())
    assert caught.value.status_code == status and message in str(caught.value.detail)


async def test_a_disconnected_client_cancels_its_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(endless, options=OPTIONS, step_s=0.001, limits={"max_output_len": 100_000}) as server:
        model = loaded_model(folder, server, monkeypatch)
        chunks = await model.predict({"prompt": "x", "max_tokens": 90_000}, Request(3))
        assert len([chunk async for chunk in chunks]) == 4
        until(lambda: not server.executor.running)
        chunks = await model.predict({"prompt": "x", "max_tokens": 90_000}, Request())
        await anext(chunks)
        await chunks.aclose()
        until(lambda: not server.executor.running)


async def test_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before the first chunk is an HTTP status; a later one is the last chunk."""
    with running(lambda request, index: ErrorInfo("step_failed", "the step failed."), options=OPTIONS) as server:
        model = loaded_model(folder, server, monkeypatch)
        with pytest.raises(HTTPException, match="the step failed") as caught:
            await model.predict({"prompt": "x"}, Request())
        assert caught.value.status_code == 500
    with running(endless, options=OPTIONS, step_s=0.001, limits={"max_output_len": 100_000}) as server:
        model = loaded_model(folder, server, monkeypatch)
        chunks = await model.predict({"prompt": "x", "max_tokens": 90_000}, Request())
        await anext(chunks)
    rest = [chunk async for chunk in chunks]
    assert json.loads(rest[-1])["status"] == "error"
    with pytest.raises(HTTPException) as caught:
        await model.predict({"prompt": "x"}, Request())
    assert caught.value.status_code == 503


async def test_messages_and_openai_bodies_are_sent_over_http(model: Any) -> None:
    streamed = await text(await model.completions({"prompt": "x", "stream": True, "max_tokens": 30}))
    assert streamed.startswith("data: ") and streamed.endswith("data: [DONE]\n\n")
    for call in (model.chat_completions, lambda body: model.predict(body, Request())):
        with pytest.raises(HTTPException, match="no chat template"):
            await call({"messages": [{"role": "user", "content": "hi"}]})
    assert (await model.completions({"prompt": "x", "max_tokens": 3}))["object"] == "text_completion"
    with pytest.raises(HTTPException) as caught:
        await model.completions({"prompt": "x", "max_tokens": "many"})
    assert caught.value.status_code == 400 and "max_tokens" in caught.value.detail["message"]


def test_the_server_is_started_and_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_ADDRESS", raising=False)
    code = (
        "import sys; from http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    model = model_class(folder)()
    monkeypatch.setattr(model, "_command", lambda port, grpc_port: [sys.executable, "-c", code, str(port)])
    model.load()
    try:
        assert model.is_healthy()
    finally:
        model._stop()
    assert not model.is_healthy()
    monkeypatch.setattr(model, "_command", lambda port, grpc_port: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="ended with status 3"):
        model.load()


def test_unsupported_options(folder: Path) -> None:
    config = {"model_metadata": {"max_tokens_counts_prompt": True}}
    with pytest.raises(RuntimeError, match="set it to false"):
        model_class(folder)(config=config).load()
