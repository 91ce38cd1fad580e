"""/v1/models/model:predict: the meaning of every field, both body formats, and the deviations from the real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from live_http import asgi_client, live_server, until
from scripted_service import ScriptedService
from truss_recordings import TokenTextService

from stoker.base.errors import QueueFullError
from stoker.base.types import SamplingParams
from stoker.deploy.truss.load import PROTOCOLS
from stoker.server.protocols.truss.options import TrussOptions
from stoker.server.protocols.truss.parameters import TABLE

PREDICT = "/v1/models/model:predict"
TRUSS = {"protocols": PROTOCOLS}


async def predict(
    body: Any, service: ScriptedService | None = None, *, path: str = PREDICT, headers: dict[str, str] | None = None, **settings: Any
) -> httpx.Response:
    async with asgi_client(service or TokenTextService(), **{**TRUSS, **settings}) as client:
        return await client.post(path, json=body, headers=headers)


async def sampling_params(body: dict[str, Any], **settings: Any) -> SamplingParams:
    """The SamplingParams that the service receives for a body."""
    service = ScriptedService()
    answer = await predict({"prompt": "hi", **body}, service, **settings)
    assert answer.status_code == 200, answer.text
    return service.requests[-1].params


async def refused(body: Any, **settings: Any) -> str:
    answer = await predict(body, ScriptedService(), **settings)
    assert answer.status_code == 400 and answer.headers["x-baseten-error-code"] == "700"
    return answer.json()["error"]


async def test_defaults_of_the_first_documentation() -> None:
    assert await sampling_params({}) == SamplingParams(max_tokens=50)
    assert await sampling_params({}, default_max_tokens=9) == SamplingParams(max_tokens=9)


FIELDS: dict[str, tuple[Any, str, Any]] = {
    "max_tokens": (7, "max_tokens", 7),
    "max_new_tokens": (7, "max_tokens", 7),
    "beam_width": (3, "beam_width", 3),
    "bad_words_list": (["x", ""], "bad_words", ((120,), (32, 120))),
    "stop_words_list": (["a", "", "b"], "stop", ("a", "b")),
    "stop": ("c", "stop", ("c",)),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "ignore_eos": (True, "ignore_eos", True),
    "temperature": (0.5, "temperature", 0.5),
    "top_k": (5, "top_k", 5),
    "top_p": (0.9, "top_p", 0.9),
    "min_p": (0.1, "min_p", 0.1),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "random_seed": (11, "seed", 11),
    "seed": (11, "seed", 11),
    "min_length": (2, "min_tokens", 2),
    "length_penalty": (0.5, "length_penalty", 0.5),
    "early_stopping": (True, "early_stopping", True),
}
OTHERS = {"prompt", "messages", "stream", "model", "request_id", "eos_token_id"}


def test_every_field_is_tested() -> None:
    assert set(FIELDS) | OTHERS == {row.name for row in TABLE}


@pytest.mark.parametrize("name", FIELDS)
async def test_fields(name: str) -> None:
    value, param, expected = FIELDS[name]
    assert getattr(await sampling_params({name: value}), param) == expected
    assert await sampling_params({name: None}) == SamplingParams(max_tokens=50)


@pytest.mark.parametrize("body, expected", [
    ({"top_p": 0.5}, (1.0, 0, 0.5)), ({"top_k": -1}, (1.0, 0, 1.0)), ({"temperature": 0.0}, (0.0, 0, 1.0)),
    ({"temperature": 0.7, "beam_width": 2}, (0.0, 0, 1.0)), ({}, (0.0, 0, 1.0)),
])  # fmt: skip
async def test_decoding_is_greedy_unless_a_sampling_field_is_set(body: dict[str, Any], expected: tuple[float, int, float]) -> None:
    found = await sampling_params(body)
    assert (found.temperature, found.top_k, found.top_p) == expected


@pytest.mark.parametrize("body, message", [
    ({}, "prompt=None is refused: it is missing"),
    ([1], "the body is a list, not an object"),
    ({"prompt": 3}, "prompt=3 is refused: it must be a string"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens=0 is refused"),
    ({"prompt": "x", "max_tokens": 5, "max_new_tokens": 6}, "max_tokens is 5"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "a prompt is given too"),
    ({"prompt": "x", "messages": []}, "a prompt is given too"),
    ({"prompt": "x", "beam_width": 65}, "beam_width=65 is refused"),
    ({"prompt": "x", "stop_words_list": "a" * 2000}, "stop_words_list"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty=0"),
    ({"prompt": "x", "stop_word_list": ["a"]}, "Did you mean stop_words_list"),
    ({"prompt": "x" * 3000}, "prompt"),
])  # fmt: skip
async def test_refusals(body: Any, message: str) -> None:
    assert message in await refused(body)


async def test_messages_by_the_chat_template() -> None:
    service = ScriptedService("yes")
    answer = await predict({"messages": [{"role": "user", "content": "hi"}]}, service)
    assert (answer.text, answer.headers["content-type"]) == ("yes", "application/octet-stream")
    assert bytes(service.requests[0].prompt) == b"<user>hi<assistant>"  # type: ignore[arg-type]


async def test_beam_search_is_not_streamed() -> None:
    assert (await predict({"prompt": "x", "beam_width": 2})).text == "Hello, wörld\nend"
    assert (await predict({"prompt": "x", "beam_width": 2, "stream": False})).json() == {"text": "Hello, wörld\nend"}


async def test_json_is_formatted_as_by_python() -> None:
    answer = await predict({"prompt": "x", "stream": False})
    assert answer.content == b'{"text": "Hello, w\\u00f6rld\\nend"}'
    packed = msgspec.msgpack.encode({"prompt": "x", "stream": False})
    async with asgi_client(TokenTextService(), **TRUSS) as client:
        answer = await client.post("/v1/models/m:predict_binary", content=packed, headers={"content-type": "application/octet-stream"})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert msgspec.msgpack.decode(answer.content) == {"text": "Hello, wörld\nend"}


COUNTING = {"options": TrussOptions(max_tokens_counts_prompt=True)}


async def test_max_tokens_of_prompt_and_answer() -> None:
    """With the token that the tokenizer adds, "hello" has six tokens."""
    assert (await sampling_params({"prompt": "hello", "max_tokens": 10}, **COUNTING)).max_tokens == 4
    assert (await sampling_params({"prompt": "hello", "max_new_tokens": 10}, **COUNTING)).max_tokens == 10
    for stream, text in ((True, "hel"), (False, '{"text": "hel"}')):
        service = ScriptedService()
        answer = await predict({"prompt": "hello", "max_tokens": 4, "stream": stream}, service, **COUNTING)
        assert (answer.status_code, answer.text, service.requests) == (200, text, []), "the prompt, truncated"


async def test_an_error_in_a_stream_is_its_last_chunk() -> None:
    service = TokenTextService("one ", "two")
    service.fails_after = 1
    answer = await predict({"prompt": "x"}, service)
    assert (answer.status_code, answer.text) == (200, 'one {"status": "error", "message": "the step failed."}')
    for headers in ({"accept": "application/json"}, {}):
        failed = await predict({"prompt": "x", "stream": bool(headers)}, service, headers=headers)
        assert (failed.status_code, failed.json(), failed.headers["x-baseten-error-code"]) == (500, {"error": "the step failed."}, "600")
    service.fails_after = 0
    failed = await predict({"prompt": "x"}, service)
    assert (failed.status_code, failed.json()) == (500, {"error": "the step failed."})


async def test_a_full_queue() -> None:
    service = TokenTextService()
    service.error = QueueFullError(4, 4, retry_after_s=3.0)
    answer = await predict({"prompt": "x"}, service)
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["x-baseten-error-code"]) == (429, "3", "700")
    assert "queue" in answer.json()["error"]


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "stream": False}])
async def test_a_disconnected_client_cancels_its_request(body: dict[str, Any]) -> None:
    """The real server continues to the end of the answer."""
    service = ScriptedService()
    service.hold = asyncio.Event()
    async with live_server(service, **TRUSS) as url, httpx.AsyncClient(base_url=url) as client:
        call = asyncio.create_task(client.post(PREDICT, json=body))
        await until(lambda: service.num_streaming)
        call.cancel()
        await until(lambda: service.left)
        assert service.num_streaming == 0


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("options, body, kind", [
    (TrussOptions(openai=True), CHAT, "chat.completion"),
    (TrussOptions(openai=True), {"prompt": "x"}, "text_completion"),
    (TrussOptions(default_route="/v1/chat/completions"), CHAT, "chat.completion"),
    (TrussOptions(default_route="/v1/completions"), {"prompt": "x"}, "text_completion"),
    (None, {"model": "any", **CHAT}, "chat.completion"),
    (None, {"model": "any", "prompt": "x"}, "text_completion"),
])  # fmt: skip
async def test_bodies_of_openai(options: TrussOptions | None, body: dict[str, Any], kind: str) -> None:
    answer = await predict(body, options=options)
    assert answer.json()["object"] == kind
    streamed = await predict({**body, "stream": True}, options=options)
    assert streamed.text.startswith("data: ") and streamed.text.endswith("data: [DONE]\n\n")
    failed = await predict({**body, "max_tokens": "many"}, options=options)
    assert failed.status_code == 400 and "max_tokens" in failed.json()["error"], "the error has the Truss server's format"


async def test_legacy_bodies_may_contain_model() -> None:
    answer = await predict({"model": "any", "prompt": "x"}, options=TrussOptions(legacy=True))
    assert answer.text == "Hello, wörld\nend"


async def test_openai_endpoints_of_the_same_server() -> None:
    async with asgi_client(TokenTextService(), **TRUSS) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).json()["object"] == "chat.completion"
        assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["model"]
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.head("/")).status_code == 200


async def test_invocations_is_predict() -> None:
    assert (await predict({"prompt": "x"}, path="/invocations")).text == "Hello, wörld\nend"


async def test_a_server_of_all_protocols_answers_predict_too() -> None:
    async with asgi_client(TokenTextService()) as client:
        assert (await client.post(PREDICT, json={"prompt": "x"})).text == "Hello, wörld\nend"
        assert (await client.get("/v1/models/model")).json()["object"] == "model", "OpenAI's"
        assert json.loads((await client.get("/ping")).content) == {"model": {"status": "Healthy"}}, "SageMaker's"


async def test_keys() -> None:
    async with asgi_client(TokenTextService(), api_keys=("secret-key",), **TRUSS) as client:
        failed = await client.post(PREDICT, json={"prompt": "x"})
        assert (failed.status_code, list(failed.json())) == (401, ["error"])
        assert (await client.get("/v1/models/model")).status_code == 200, "probes send no key"
        answer = await client.post(PREDICT, json={"prompt": "x"}, headers={"authorization": "Bearer secret-key"})
    assert answer.text == "Hello, wörld\nend"


@pytest.mark.parametrize("body, message", [
    (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
    (b"[" * 100_000, "it is nested too deeply|Expecting value"),
    (b'{"prompt": NaN}', "prompt=nan"),
    (b'{"prompt": "x", "temperature": Infinity}', "temperature=inf"),
])  # fmt: skip
async def test_hostile_bodies(body: bytes, message: str) -> None:
    async with asgi_client(TokenTextService(), **TRUSS) as client:
        answer = await client.post(PREDICT, content=body)
        assert answer.status_code == 400 and any(text in answer.json()["error"] for text in message.split("|")), answer.text
        assert (await client.post(PREDICT, json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize("charset", ["utf-16-le", "utf-8-sig", "utf-32"])
async def test_unicode_encodings_that_python_s_json_accepts(charset: str) -> None:
    async with asgi_client(TokenTextService(), **TRUSS) as client:
        assert (await client.post(PREDICT, content='{"prompt": "ö"}'.encode(charset))).status_code == 200
