"""The exported model.py: what it asks a Stoker server over gRPC and HTTP, and what its caller gets. The oracle is Stoker's own door."""

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
from triton_server import TEXT, Running, endless, running, until

from stoker.deploy import truss
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.triton.export import five_models
from stoker.runtime.request import ErrorInfo
from stoker.server.protocols.kserve.model_config import TritonOptions

OPTIONS = TritonOptions(
    models=five_models(EngineInfo(path="e", architecture="x", vocab_size=512), {"decoupled_mode": "true"}), unary=True, max_beam_width=4
)
PREDICT = "/v1/models/model:predict"


@pytest.fixture(scope="module")
def folder(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("truss") / "exported"
    truss.export(EngineInfo(path=str(tiny_engine), architecture="LlamaForCausalLM", vocab_size=320), out, {})
    return out


def model_class(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(options=OPTIONS) as started:
        yield started


@pytest.fixture
def model(folder: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded(folder, server, monkeypatch)


def loaded(folder: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STOKER_ADDRESS", f"http://{server.http}")
    monkeypatch.setenv("STOKER_GRPC", server.grpc)
    made = model_class(folder)(config={}, data_dir="data", secrets={}, environment=None)
    assert not made.is_healthy()
    made.load()
    assert made.is_healthy()
    return made


class Request:
    """What predict asks of Truss's request: whether the client is there still. It leaves after so many pieces."""

    def __init__(self, pieces: int = 1 << 30) -> None:
        self._left = pieces

    async def is_disconnected(self) -> bool:
        self._left -= 1
        return self._left < 0


async def text(answer: AsyncGenerator[str | bytes, None]) -> str:
    return "".join([piece.decode() if isinstance(piece, bytes) else piece async for piece in answer])


async def test_plain_text_as_it_comes(model: Any) -> None:
    answer = await model.predict({"prompt": "hi"}, Request())
    pieces = [piece async for piece in answer]
    assert "".join(pieces) == TEXT and len(pieces) > 5 and all(isinstance(piece, str) and piece for piece in pieces)
    assert await model.predict({"prompt": "hi", "stream": False}, Request()) == {"text": TEXT}


BODIES: list[dict[str, Any]] = [
    {}, {"max_tokens": 3}, {"max_new_tokens": 4}, {"stop_words_list": ["fox", ""]}, {"stop": "quick"}, {"bad_words_list": ["dog", "cat"]},
    {"bad_words_list": []}, {"repetition_penalty": 1.5}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "temperature": 0.25},
    {"temperature": 0}, {"random_seed": 7, "top_k": 2}, {"seed": 8, "top_k": 2}, {"min_length": 2}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"length_penalty": 0.5}, {"prompt": "", "max_tokens": 2},
    {"max_tokens": None}, {"stream": False, "stop_words_list": None},
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_it_asks_what_the_door_asks(model: Any, server: Running, body: dict[str, Any]) -> None:
    body = {"prompt": "once", **body}
    answer = await model.predict(body, Request())
    said = answer["text"] if isinstance(answer, dict) else await text(answer)
    async with httpx.AsyncClient() as client:
        door = await client.post(f"http://{server.http}{PREDICT}", json=body)
    assert door.status_code == 200, door.text
    assert said == (door.json()["text"] if body.get("stream") is False else door.text)
    through, direct = server.executor.requests[-2:]
    assert (list(through.prompt_ids), through.end_ids or through.params.stop_token_ids) == (
        list(direct.prompt_ids), direct.end_ids or direct.params.stop_token_ids,
    )  # fmt: skip
    assert through.params == direct.params


async def test_ignore_eos(model: Any, server: Running) -> None:
    await text(await model.predict({"prompt": "x", "ignore_eos": True}, Request()))
    asked = server.executor.requests[-1]
    assert not asked.end_ids and not asked.params.stop_token_ids


@pytest.mark.parametrize("body, status, told", [
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
async def test_refusals_are_statuses(model: Any, body: Any, status: int, told: str) -> None:
    with pytest.raises(HTTPException) as caught:
        await model.predict(body, Request())
    assert caught.value.status_code == status and told in str(caught.value.detail)


async def test_a_client_that_leaves_frees_the_executor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(endless, options=OPTIONS, step_s=0.001, limits={"max_output_len": 100_000}) as server:
        made = loaded(folder, server, monkeypatch)
        pieces = await made.predict({"prompt": "x", "max_tokens": 90_000}, Request(3))
        assert len([piece async for piece in pieces]) == 4
        until(lambda: not server.executor.running)
        pieces = await made.predict({"prompt": "x", "max_tokens": 90_000}, Request())
        await anext(pieces)
        await pieces.aclose()
        until(lambda: not server.executor.running)


async def test_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first piece a status, then a last piece."""
    with running(lambda request, index: ErrorInfo("step_failed", "the step failed."), options=OPTIONS) as server:
        made = loaded(folder, server, monkeypatch)
        with pytest.raises(HTTPException, match="the step failed") as caught:
            await made.predict({"prompt": "x"}, Request())
        assert caught.value.status_code == 500
    with running(endless, options=OPTIONS, step_s=0.001, limits={"max_output_len": 100_000}) as server:
        made = loaded(folder, server, monkeypatch)
        pieces = await made.predict({"prompt": "x", "max_tokens": 90_000}, Request())
        await anext(pieces)
    rest = [piece async for piece in pieces]
    assert json.loads(rest[-1])["status"] == "error"
    with pytest.raises(HTTPException) as caught:
        await made.predict({"prompt": "x"}, Request())
    assert caught.value.status_code == 503


async def test_conversations_and_openai_go_over_http(model: Any) -> None:
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
    made = model_class(folder)()
    monkeypatch.setattr(made, "_command", lambda port, grpc_port: [sys.executable, "-c", code, str(port)])
    made.load()
    try:
        assert made.is_healthy()
    finally:
        made._stop()
    assert not made.is_healthy()
    monkeypatch.setattr(made, "_command", lambda port, grpc_port: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="ended with status 3"):
        made.load()


def test_what_it_cannot_honour(folder: Path) -> None:
    config = {"model_metadata": {"max_tokens_counts_prompt": True}}
    with pytest.raises(RuntimeError, match="set it to false"):
        model_class(folder)(config=config).load()
