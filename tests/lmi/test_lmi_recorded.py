"""Responses of /invocations equal the recorded responses of the DJL server and its formatters, byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_http import asgi_client
from lmi_recordings import Recorded, RecordedService, read_formatted, read_recordings

from stoker.server.protocols.sagemaker.options import LMIOptions

CURRENT = pytest.mark.compatibility(
    protocol="LMI and SageMaker",
    client="DJL Serving with LMI, recorded",
    version="0.36",
    feature="formatters, routes, errors, TGI compatibility, byte for byte",
)

_REFUSED = "a request that the engine refuses returns 200"
_MESSAGES = "empty `messages` are accepted"
# Exchanges in which the real server has a bug, each with the row of docs/sagemaker.md that documents Stoker's response.
# tests/lmi/test_lmi_invocations.py tests that response. A title has one of these beginnings, followed by nothing or a space.
DEVIATIONS = {
    "Content-Type text/plain": "another Content-Type than JSON",
    "3p formatter without details: the formatter itself fails (KeyError generated_tokens), the whole batch gets 424": "the `3p` formatter",
    "the very next request fails too (the engine still holds the old request)": "the next one fails too",
    "stream true": "the next one fails too",
    "output_formatter unknown name": "an unknown `output_formatter`",
    "one request refused by the engine (error token, finish_reason error), not streaming": _REFUSED,
    "the same with details": _REFUSED,
    "one request refused by the engine, streaming": _REFUSED,
    "refused, with an error code set on the request (424)": _REFUSED,
    "refused with a code, streaming": _REFUSED,
    "chat: refused": _REFUSED,
    "stream, logprobs": "chat streams have `top_logprobs`",
    "chat stream with logprobs": "chat streams have `top_logprobs`",
    "stream with output_formatter sse_chat": "`/v1/chat/completions` streams JSON lines",
    "empty messages": _MESSAGES,
    "message without role": "a message without `role`",
    "engine exception after two tokens, streaming": "in an SSE stream",
}


def test_every_deviation_from_the_real_server_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sagemaker.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert [text for text in DEVIATIONS.values() if not any(text in row for row in rows)] == []


def deviates(title: str) -> bool:
    return any(title == start or title.startswith(f"{start} ") for start in DEVIATIONS)


def cases(*names: str) -> list[Any]:
    return [
        pytest.param(case, id=f"{name[:2]} {case.title}")
        for name in names
        for case in read_recordings(name)
        if not deviates(case.title) and "/v1/" not in case.path
    ]


async def replay(case: Recorded, client: httpx.AsyncClient) -> httpx.Response:
    headers = {name: value for name, value in case.headers.items() if name not in ("host", "content-length", "connection")}
    return await client.request(case.method, case.path, content=case.request_body, headers=headers)


def normalized(body: bytes) -> bytes:
    """A body without ids and times, and with the service's texts instead of the `x` of the recordings' engine."""
    body = re.sub(rb'"id": "chatcmpl-[^"]*"', b'"id": "chatcmpl-0"', body)
    body = re.sub(rb'"created": \d+', b'"created": 0', body)
    return body.replace(b'102, "text": "x"', b'102, "text": ","').replace(b'103, "text": "x"', '103, "text": " wörld"'.encode())


@pytest.mark.parametrize("case", cases("01-*", "02-*", "04-*", "03-*"))
@CURRENT
async def test_rolling_batch(case: Recorded) -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",)) as client:
        answer = await replay(case, client)
    assert (answer.status_code, normalized(answer.content)) == (case.status, normalized(case.body))
    if case.status == 200:
        assert answer.headers["content-type"] == case.content_type
    if "x-request-id" in case.headers:
        assert answer.headers["requestid"] == answer.headers["x-request-id"] == case.headers["x-request-id"]


@pytest.mark.parametrize("case", cases("09-*"))
@CURRENT
async def test_tgi_compat(case: Recorded) -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",), options=LMIOptions(tgi_compat=True)) as client:
        answer = await replay(case, client)
    assert (answer.status_code, normalized(answer.content)) == (case.status, normalized(case.body))
    assert answer.headers["content-type"] == case.content_type


ROUTES = (
    "GET /ping", "POST /ping", "GET /models/none", "GET /predictions", "POST /predictions/llm", "POST /predictions/none",
    "POST /predictions/", "POST /models/llm/invoke", "POST /models/none/invoke", "POST /invocations?model_name=llm",
    "POST /invocations?model_name=none", "POST /predictions/llm/v9",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, id=c.title) for c in read_recordings("05-*") if c.title in ROUTES])
@CURRENT
async def test_routes(case: Recorded) -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",)) as client:
        answer = await replay(case, client)
    assert (answer.status_code, answer.content) == (case.status, case.body)
    assert answer.headers["content-type"] == case.content_type.lower()


def test_all_routes_are_recorded() -> None:
    assert {case.title for case in read_recordings("05-*")} >= set(ROUTES)


@pytest.mark.parametrize("dialect", ["0.26", "0.27"])
@pytest.mark.compatibility(
    protocol="LMI and SageMaker",
    client="DJL Serving with LMI, recorded",
    version="0.26, 0.27",
    feature="formatters of earlier releases, byte for byte",
)
async def test_formatters_of_earlier_releases(dialect: Any) -> None:
    found = [case for case in read_formatted(f"0*-formatters-{dialect}.txt") if "chat" not in case.formatter]
    assert len(found) == {"0.26": 8, "0.27": 10}[dialect]
    for case in found:
        parameters = {**case.parameters, "max_new_tokens": case.steps}
        stream = parameters.pop("stream", False)
        body = {"inputs": "hi there", "stream": stream or case.formatter == "jsonlines", "parameters": parameters}
        async with asgi_client(RecordedService(), protocols=("sagemaker",), options=LMIOptions(dialect=dialect)) as client:
            answer = await client.post("/invocations", json=body)
        assert answer.content == case.body, case.title


@pytest.mark.parametrize(
    "case", [c for c in read_formatted("08-*") if "chat" in c.formatter and not deviates(c.title)], ids=lambda case: case.title
)
@CURRENT
async def test_chat_formatters(case: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": case.steps, "stream": case.formatter == "jsonlines_chat"}
    body |= {"logprobs": True, "top_logprobs": 1} if case.parameters.get("logprobs") else {}
    async with asgi_client(RecordedService(), protocols=("sagemaker",), options=LMIOptions(dialect="0.27")) as client:
        answer = await client.post("/invocations", json=body)
    assert normalized(answer.content) == normalized(case.body)


ASYNC_TITLES = {
    "inputs only",
    "return_full_text",
    "stream",
    "stream, return_full_text",
    "not JSON",
    "neither inputs, prompt nor messages",
    "empty body",
    "inputs a list",
    "GET /ping",
    "details",
    "details, cut at 2, seed",
    "stream, details",
    "stream, details, cut at 2, seed",
}


@pytest.mark.parametrize("case", [pytest.param(c, id=c.title) for c in read_recordings("06-*") if c.title in ASYNC_TITLES])
@CURRENT
async def test_async_dialect(case: Recorded) -> None:
    """Responses equal the recording except for two values of `details`.

    Without stream the recorded finish reason is null, and the recorded engine counts its tokens differently.
    """
    async with asgi_client(RecordedService(3), protocols=("sagemaker",), options=LMIOptions(dialect="async")) as client:
        answer = await replay(case, client)
    expected = case.body
    if "details" in case.title:
        expected = expected.replace(b'"finish_reason": null', b'"finish_reason": "length"').replace(b'"stop"', b'"length"')
        expected = expected.replace(b'"generated_tokens": 4', b'"generated_tokens": 3') if b"w\xc3" in expected else expected
        expected = expected.replace(b'"generated_tokens": 3', b'"generated_tokens": 2') if b"w\xc3" not in expected else expected
    assert (answer.status_code, answer.content) == (case.status, expected)
    assert answer.headers["content-type"] == case.content_type.lower()


async def test_async_dialect_accepts_openai_bodies() -> None:
    async with asgi_client(RecordedService(3), protocols=("sagemaker",), options=LMIOptions(dialect="async")) as client:
        chat = await client.post("/invocations", json={"messages": [{"role": "user", "content": "hi"}], "model": "any"})
        lines = await client.post("/invocations", json={"prompt": "hi", "stream": True, "max_tokens": 3})
    assert chat.content.endswith(b"}\n")
    assert json.loads(chat.content)["choices"][0]["message"]["content"] == "Hello, wörld"
    assert lines.headers["content-type"] == "application/jsonlines"
    assert lines.content.endswith(b"}\n\n")
    chunks = [json.loads(line) for line in lines.content.splitlines() if line]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "Hello, wörld"
