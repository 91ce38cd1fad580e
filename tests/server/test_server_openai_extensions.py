"""Fields of vLLM's and newer OpenAI APIs: usage of chunks, token ids, truncation, echo, allowed tools; and the route /load."""

from __future__ import annotations

from typing import Any

import pytest
from live_http import asgi_client, events
from scripted_service import ScriptedService

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = list(b"<user>hi<assistant>")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time", "news")]


async def post(path: str, body: dict[str, Any], service: ScriptedService | None = None, **settings: Any) -> Any:
    body = {**({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}), **body}
    async with asgi_client(service or ScriptedService("abc"), **settings) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return events(answer.text)[:-1] if body.get("stream") else answer.json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "in_chunks", "last"),
    [
        ({}, False, False),
        ({"include_usage": True}, False, True),
        ({"continuous_usage_stats": True}, True, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_obfuscation": False}, False, False),
    ],
)
async def test_usage_of_chunks(path: str, options: dict[str, bool], in_chunks: bool, last: bool) -> None:
    chunks = await post(path, {"stream": True, "stream_options": options})
    assert (chunks[-1]["choices"] == []) is last
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    assert {chunk.get("usage") is not None for chunk in with_choices} == {in_chunks}
    assert last == ("usage" in with_choices[0])


async def test_token_ids_of_completions() -> None:
    choice = (await post(COMPLETIONS, {"return_token_ids": True}))["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (list(b"abc"), [2, *b"hi"])
    chunks = [chunk["choices"][0] for chunk in await post(COMPLETIONS, {"return_token_ids": True, "stream": True})]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(b"abc")
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[2, *b"hi"], *[None] * (len(chunks) - 1)]
    assert "token_ids" not in (await post(COMPLETIONS, {}))["choices"][0]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_token_ids_of_chat(include_usage: bool) -> None:
    """The reasoning parser holds text back, but not token ids."""
    service, settings = ScriptedService("<think>hm</think>Yes"), {"reasoning_parser": "qwen3"}
    whole = await post(CHAT, {"return_token_ids": True}, service, **settings)
    assert (whole["choices"][0]["token_ids"], whole["prompt_token_ids"]) == (list(b"<think>hm</think>Yes"), PROMPT)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = await post(CHAT, {"return_token_ids": True, "stream": True, **options}, service, **settings)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT, *[None] * (len(chunks) - 1)]
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert ids == list(b"<think>hm</think>Yes")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_without_detokenization_there_is_no_text(path: str) -> None:
    body = {"detokenize": False, "return_token_ids": True}
    choice = (await post(path, body))["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "" and choice["token_ids"] == list(b"abc")
    chunks = [chunk["choices"][0] for chunk in await post(path, {**body, "stream": True})]
    assert "".join(chunk["delta"].get("content", "") if path == CHAT else chunk["text"] for chunk in chunks) == ""
    assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == list(b"abc")


@pytest.mark.parametrize(("side", "expected"), [(None, b"<assistant>"[-4:]), ("left", b"<assistant>"[-4:]), ("right", b"<use")])
async def test_truncation_side(side: str | None, expected: bytes) -> None:
    service = ScriptedService("!")
    await post(CHAT, {"truncate_prompt_tokens": 4, "truncation_side": side}, service)
    assert service.requests[0].prompt == list(expected)
    await post(
        COMPLETIONS, {"prompt": "abcdefgh", "truncate_prompt_tokens": 4, "truncation_side": side, "add_special_tokens": False}, service
    )
    assert service.requests[1].truncation_side == (side or "left")
    echoed = await post(COMPLETIONS, {"prompt": "abcdefgh", "truncate_prompt_tokens": 4, "truncation_side": side, "echo": True}, service)
    assert echoed["choices"][0]["text"] == ("abc!" if side == "right" else "efgh!"), "the tokenizer adds one token at the start"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_null_in_the_request_is_a_null_in_the_response(path: str) -> None:
    """Clients of vLLM read `prompt_logprobs` of every response to a request that names it."""
    whole = await post(path, {"prompt_logprobs": None})
    holder = whole if path == CHAT else whole["choices"][0]
    assert holder["prompt_logprobs"] is None
    assert "prompt_logprobs" not in (await post(path, {}))


async def test_continue_final_message_alone() -> None:
    service = ScriptedService(" world")
    last = {"role": "assistant", "content": "Hello"}
    body = {"messages": [*MESSAGES, last], "continue_final_message": True}
    answer = await post(CHAT, body, service)
    values = service.rendered[0][1]
    assert (values["continue_final_message"], values["add_generation_prompt"]) == (True, False)
    assert answer["choices"][0]["message"]["content"] == " world"
    async with asgi_client(service) as client:
        assert (await client.post("/tokenize", json=body)).status_code == 200
    assert service.rendered[1][1]["add_generation_prompt"] is False


@pytest.mark.parametrize("content", ["Hello", [{"type": "text", "text": "Hello"}]])
async def test_echo_of_chat(content: Any) -> None:
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": content}], "continue_final_message": True, "echo": True}
    service = ScriptedService(" world")
    assert (await post(CHAT, body, service))["choices"][0]["message"] == {"role": "assistant", "content": "Hello world"}
    chunks = await post(CHAT, {**body, "stream": True}, service)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello world"
    other = await post(CHAT, {"echo": True}, service)
    assert other["choices"][0]["message"]["content"] == " world", "the last message has another role"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(mode: str) -> None:
    allowed = [{"type": "function", "function": {"name": name}} for name in ("news", "time")]
    body = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}}
    service = ScriptedService("[]")
    await post(CHAT, body, service, tool_parser="hermes")
    assert [tool["function"]["name"] for tool in service.rendered[0][1]["tools"]] == ["news", "time"]
    guide = service.requests[0].params.guide
    assert (guide is not None) is (mode == "required") and (guide is None or "weather" not in guide.text)


async def test_load() -> None:
    async with asgi_client(ScriptedService()) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
