"""Ollama's API with the real `ollama` client over a loopback socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest
from live_http import live_server
from scripted_service import ScriptedService

from stoker.base.errors import QueueFullError

pytestmark = pytest.mark.compatibility(
    protocol="Ollama", client="ollama", feature="chat, generate, options, formats, tools, thinking, models, errors"
)

KEY = "secret-key-1"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService("Hello, wörld 🎉!", max_output_len=1024, max_input_len=512)


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[ollama.AsyncClient]:
    async with (
        live_server(service, api_keys=(KEY,), tool_parser="hermes", reasoning_parser="qwen3") as url,
        ollama.AsyncClient(host=url, headers={"authorization": f"Bearer {KEY}"}) as client,
    ):
        yield client


async def chat(client: ollama.AsyncClient, **fields: Any) -> ollama.ChatResponse:
    """A whole response, which is equal to the joined stream."""
    fields = {"model": "tiny", "messages": USER, **fields}
    whole = await client.chat(**fields)
    content, thinking, calls, last = "", "", [], None
    async for part in await client.chat(**fields, stream=True):
        content, thinking = content + (part.message.content or ""), thinking + (part.message.thinking or "")
        calls += part.message.tool_calls or []
        assert last is None or not last.done
        last = part
    assert last is not None and last.done
    assert (content, thinking or None, calls or None) == (whole.message.content, whole.message.thinking, whole.message.tool_calls)
    assert (last.done_reason, last.eval_count, last.prompt_eval_count) == (whole.done_reason, whole.eval_count, whole.prompt_eval_count)
    return whole


async def test_chat(client: ollama.AsyncClient, service: ScriptedService) -> None:
    answer = await chat(client, messages=[{"role": "system", "content": "be brief"}, *USER])
    assert answer.message.content == "Hello, wörld 🎉!" and answer.done_reason == "stop" and answer.model == "tiny"
    assert answer.eval_count == 19 and answer.prompt_eval_count == len("<system>be brief<user>hi<assistant>")
    assert answer.total_duration is not None and answer.eval_duration is not None and answer.total_duration >= answer.eval_duration >= 0
    params = service.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)  # of Ollama
    assert (await client.chat("tiny:latest", USER)).message.content == "Hello, wörld 🎉!"


async def test_options_and_format(client: ollama.AsyncClient, service: ScriptedService) -> None:
    options = {"num_predict": 5, "temperature": 0, "seed": 7, "stop": ["x"], "repeat_penalty": 1.2, "num_ctx": 4096, "mirostat": 0}
    cut = await chat(client, options=options, format="json", keep_alive="5m")
    params = service.requests[0].params
    assert (params.max_tokens, params.temperature, params.seed, params.stop, params.repetition_penalty) == (5, 0, 7, ("x",), 1.2)
    assert cut.done_reason == "length" and params.guide is not None and json.loads(params.guide.text) == {"type": "object"}
    await chat(client, format=SCHEMA, options=ollama.Options(num_predict=-1))
    guide = service.requests[-1].params.guide
    assert guide is not None and json.loads(guide.text) == SCHEMA and service.requests[-1].params.max_tokens > 100


async def test_tools_and_thinking(client: ollama.AsyncClient, service: ScriptedService) -> None:
    service.answers = [f"<think>hmm 🤔</think>I look.\n{CALL}{CALL.replace('Oslo', 'Rome')}"]

    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Its name.
        """
        return city

    for group in (1, 7, 1000):
        service.group = group
        answer = await chat(client, tools=[weather], think=True)
    assert answer.message.thinking == "hmm 🤔" and answer.message.content == "I look."
    assert [call.function.arguments for call in answer.message.tool_calls or ()] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert service.rendered[-1][1]["enable_thinking"] is True
    service.answers = ["Sunny."]
    results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("20", "30")]
    await chat(client, messages=[*USER, answer.message, *results], tools=[TOOL], think="low")
    user, assistant, first, second = service.rendered[-1][0]
    assert assistant["reasoning_content"] == "hmm 🤔" and assistant["content"] == "I look."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert [first["tool_call_id"], second["tool_call_id"]] == [call["id"] for call in assistant["tool_calls"]]
    assert first["content"] == "20" and first["name"] == "weather" and user["content"] == "hi"
    assert service.rendered[-1][1]["reasoning_effort"] == "low"
    service.answers = [CALL]
    assert (await chat(client, tools=[TOOL], options={"num_predict": 50})).message.tool_calls is None  # its arguments are cut off


async def test_generate(client: ollama.AsyncClient, service: ScriptedService) -> None:
    answer = await client.generate("tiny", "hi", system="be brief")
    assert answer.response == "Hello, wörld 🎉!" and answer.done_reason == "stop"
    assert service.rendered[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert answer.context is not None and bytes(answer.context).decode() == "<system>be brief<user>hi<assistant>Hello, wörld 🎉!"
    await client.generate("tiny", "more", context=answer.context)
    assert service.requests[-1].prompt[: len(answer.context)] == list(answer.context)
    parts = [part async for part in await client.generate("tiny", "hi", stream=True)]
    assert "".join(part.response or "" for part in parts) == answer.response and parts[-1].done and not parts[0].done
    raw = await client.generate("tiny", "as it is", raw=True)
    assert bytes(service.requests[-1].prompt).decode() == "\x02as it is" and raw.context is None  # type: ignore[arg-type]
    service.answers = ["<think>hm</think>Yes"]
    thought = await client.generate("tiny", "hi", think=True)
    assert thought.thinking == "hm" and thought.response == "Yes"


async def test_a_model_without_a_chat_template(service: ScriptedService) -> None:
    service.chat_template = None  # type: ignore[assignment]
    async with live_server(service) as url, ollama.AsyncClient(host=url) as client:
        assert (await client.generate("tiny", "once")).response == "Hello, wörld 🎉!"
        assert service.requests[-1].prompt == [2, *b"once"]


async def test_log_probabilities(client: ollama.AsyncClient) -> None:
    answer = await client.chat("tiny", USER, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None and len(answer.logprobs) == 19 and len(answer.logprobs[0].top_logprobs or ()) == 2
    parts = [part async for part in await client.chat("tiny", USER, stream=True, logprobs=True)]
    assert [entry.token for part in parts for entry in part.logprobs or ()] == [entry.token for entry in answer.logprobs]


async def test_models(client: ollama.AsyncClient) -> None:
    (model,) = (await client.list()).models
    assert model.model == "tiny" and model.digest and model.details is not None and model.details.family == "scripted"
    shown = await client.show("tiny")
    assert shown.template == "a scripted template" and shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None and shown.modelinfo["scripted.context_length"] == 512 + 1024
    (running,) = (await client.ps()).models
    assert running.model == "tiny" and running.context_length == 1536


async def test_a_request_without_a_prompt_generates_nothing(client: ollama.AsyncClient, service: ScriptedService) -> None:
    assert (await client.generate("tiny", keep_alive="1h")).done_reason == "load"
    assert (await client.chat("tiny", [])).done_reason == "load" and service.requests == []


async def test_curl_s_default_content_type(client: ollama.AsyncClient) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/x-www-form-urlencoded"}
    async with httpx.AsyncClient(base_url=str(client._client.base_url), headers=headers) as http:
        response = await http.post("/api/generate", content='{"model": "tiny", "prompt": "hi"}')
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert "".join(line["response"] for line in lines) == "Hello, wörld 🎉!"
        page = {"origin": "https://evil.example"}
        assert (await http.post("/api/generate", content="{}", headers=page)).status_code == 415
        assert (await http.get("/api/version")).json()["version"].count(".") == 2


async def test_errors_are_exceptions_of_the_client(client: ollama.AsyncClient, service: ScriptedService) -> None:
    for call in (client.chat("nope", USER), client.show("nope"), client.pull("llama3")):
        with pytest.raises(ollama.ResponseError) as missing:
            await call
        assert missing.value.status_code == 404
    service.error = QueueFullError(1, 1, 1.0)
    with pytest.raises(ollama.ResponseError) as full:
        await client.chat("tiny", USER)
    assert full.value.status_code == 429
    service.error, service.fails_after = None, 2
    with pytest.raises(ollama.ResponseError, match="the step failed"):
        async for _ in await client.chat("tiny", USER, stream=True):
            pass
    with pytest.raises(ollama.ResponseError, match="the step failed"):
        await client.chat("tiny", USER)


@pytest.mark.parametrize(
    ("path", "field", "value", "named"),
    [
        ("chat", "messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        ("chat", "messages", [{"role": "user", "content": "x", "images": ["aGk="]}], "messages[0].images"),
        ("chat", "messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ("chat", "messages", [{"role": "user", "content": "x" * 600}], "messages"),
        ("chat", "tools", [{"type": "function"}], "tools[0].function"),
        ("chat", "options", {"temperature": -1}, "options.temperature"),
        ("chat", "options", {"mirostat": 2}, "options.mirostat"),
        ("chat", "options", {"temprature": 1}, "options.temprature"),
        ("chat", "format", "xml", "format"),
        ("chat", "think", "much", "think"),
        ("generate", "suffix", "x", "suffix"),
        ("generate", "template", "x", "template"),
        ("generate", "top_logprobs", 3, "top_logprobs"),
        ("generate", "prompt", "x" * 600, "prompt"),
        ("generate", "context", [-1], "context[0]"),
    ],
)
async def test_a_wrong_field_is_named(client: ollama.AsyncClient, path: str, field: str, value: Any, named: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"messages": USER} if path == "chat" else {"prompt": "hi"}
    async with httpx.AsyncClient(base_url=str(client._client.base_url), headers=headers) as http:
        response = await http.post(f"/api/{path}", json={"model": "tiny", **body, field: value})
    assert response.status_code == 400 and response.json()["error"].startswith(f"{named}=")


async def test_thinking_needs_a_parser(service: ScriptedService) -> None:
    async with live_server(service) as url, ollama.AsyncClient(host=url) as client:
        with pytest.raises(ollama.ResponseError, match="reasoning-parser"):
            await client.chat("tiny", USER, think=True)
        await client.chat("tiny", USER, think=False)
        assert service.rendered[-1][1]["enable_thinking"] is False
