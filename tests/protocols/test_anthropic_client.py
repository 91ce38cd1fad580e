"""Anthropic's Messages API with the real `anthropic` client over a loopback socket. Each event is checked against its models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from live_http import live_server
from scripted_service import ScriptedService

from stoker.base.errors import QueueFullError, UnavailableError

pytestmark = pytest.mark.compatibility(
    protocol="Anthropic", client="anthropic", feature="messages, streams, tools, thinking, structured output, token counts, errors"
)

KEY = "secret-key-1"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "now", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
USER: Any = [{"role": "user", "content": "hi"}]
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService("Hello, wörld 🎉!", max_output_len=1024, max_input_len=512)


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        live_server(service, api_keys=(KEY,), tool_parser="hermes", reasoning_parser="qwen3") as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        yield client


async def create(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    """A whole message, which the client's model accepts strictly."""
    message = await client.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": USER, **fields})
    Message.model_validate(message.model_dump(exclude_unset=True))
    return message  # type: ignore[no-any-return]


async def stream(client: anthropic.AsyncAnthropic, **fields: Any) -> tuple[list[Any], Message]:
    """The raw events of a stream, and the message that the client assembles from the same request."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": USER, **fields}
    raw = await client.messages.create(**body, stream=True)
    events = [EVENT.validate_python(event.model_dump(exclude_unset=True)) async for event in raw]
    async with client.messages.stream(**body) as assembled:
        return events, await assembled.get_final_message()


def content(message: Message) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.to_dict().items() if name != "id"} for block in message.content]


async def test_text(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    message = await create(
        client, system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}], extra_body={"temperature": 0.5}
    )
    assert content(message) == [{"type": "text", "text": "Hello, wörld 🎉!"}] and message.stop_reason == "end_turn"
    assert service.rendered[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    params = service.requests[0].params
    assert params.temperature == 0.5 and params.max_tokens == 500 and service.rendered[0][1]["enable_thinking"] is False
    prompt = len("<system>be brief<user>hi<assistant>")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (prompt - 2, 2, 19)
    raw = await client.messages.with_raw_response.create(model="tiny", max_tokens=5, messages=USER)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]


async def test_the_stream_is_the_whole_message(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    service.answers = [f"<think>hmm 🤔</think>I look.\n{CALL}{CALL.replace('Oslo', 'Rome')}"]
    fields: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = await create(client, **fields)
    for group in (1, 7, 1000):
        service.group = group
        events, assembled = await stream(client, **fields)
        assert content(assembled) == content(whole) and assembled.usage == whole.usage
        assert assembled.stop_reason == whole.stop_reason == "tool_use"
        kinds = [event.type for event in events if event.type != "content_block_delta"]
        assert kinds == ["message_start", *["content_block_start", "content_block_stop"] * 4, "message_delta", "message_stop"]
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "hmm 🤔" and whole.content[3].input == {"city": "Rome"}  # type: ignore[union-attr]
    assert whole.usage.output_tokens_details is not None and whole.usage.output_tokens_details.thinking_tokens == 8
    assert service.rendered[-1][1]["enable_thinking"] is True


async def test_thinking_is_returned_on_request_only(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    service.answers = ["<think>hmm</think>Yes"]
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        events, assembled = await stream(client, **fields)
        assert content(assembled) == content(await create(client, **fields)) == [{"type": "text", "text": "Yes"}]
        assert next(event.index for event in events if event.type == "content_block_start") == 0
    omitted = await create(client, thinking={"type": "adaptive", "display": "omitted"})
    assert content(omitted)[0]["thinking"] == "" and content(omitted)[1]["text"] == "Yes"


async def test_a_tool_loop(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    service.answers = [f"<think>look</think>Wait.{CALL}"]
    first = await create(client, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 °C"}]}
    failed = {"type": "tool_result", "tool_use_id": "other", "content": "no", "is_error": True}
    turns: Any = [
        *USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "and?"}]},
    ]
    service.answers = ["Sunny."]
    second = await create(client, messages=turns, tools=[TOOL])
    assert content(second) == [{"type": "text", "text": "Sunny."}]
    user, assistant, tool, error, question = service.rendered[-1][0]
    assert assistant["content"] == "Wait." and assistant["reasoning_content"] == "look"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert tool == {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "20 °C"}
    assert error["content"] == "Error: no" and question == {"role": "user", "content": "and?"} and user["content"] == "hi"


async def test_tool_choice(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    service.answers = ['{"city": "Oslo"}']
    forced = await create(client, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert content(forced) == [{"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}] and forced.stop_reason == "tool_use"
    service.answers = ['[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "weather", "parameters": {"city": "Rome"}}]']
    both = await create(client, tools=[TOOL], tool_choice={"type": "any"})
    assert [block.input for block in both.content] == [{"city": "Oslo"}, {"city": "Rome"}]  # type: ignore[union-attr]
    one = await create(client, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert len(one.content) == 1
    service.answers = [CALL]
    assert content(await create(client, tools=[TOOL], tool_choice={"type": "none"})) == [{"type": "text", "text": CALL}]


async def test_structured_output(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    class City(pydantic.BaseModel):
        city: str

    service.answers = ['{"city": "Oslo"}']
    parsed = await client.messages.parse(model="tiny", max_tokens=50, messages=USER, output_format=City)
    assert parsed.parsed_output == City(city="Oslo")
    guide = service.requests[0].params.guide
    assert guide is not None and "city" in json.loads(guide.text)["properties"]


async def test_stop_reasons_and_a_prefilled_answer(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    cut = await create(client, max_tokens=5)
    assert cut.stop_reason == "max_tokens" and content(cut)[0]["text"] == "Hello"
    service.answers = [CALL]
    partial = await create(client, max_tokens=50, tools=[TOOL])
    assert partial.stop_reason == "max_tokens" and content(partial)[0]["input"] == {}
    await create(client, messages=[*USER, {"role": "assistant", "content": "I think"}], stop_sequences=["x"])
    values = service.rendered[-1][1]
    assert values["continue_final_message"] is True and values["add_generation_prompt"] is False
    assert service.requests[-1].params.stop == ("x",)


async def test_count_tokens(client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model="tiny", messages=USER, system="x", tools=[TOOL])
    assert counted.input_tokens == len("<system>x<user>hi<assistant>")


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny") and model.created_at.year > 2000
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_are_exceptions_of_the_client(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await create(client, model="nope")
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        await create(client.with_options(api_key="wrong-key"))
    assert unknown.value.type == "authentication_error"
    bearer = anthropic.AsyncAnthropic(base_url=str(client.base_url), auth_token=KEY, max_retries=0)
    assert content(await create(bearer))[0]["type"] == "text"
    for error, status, kind in ((QueueFullError(1, 1, 1.0), 429, "rate_limit_error"), (UnavailableError("gone."), 503, "overloaded_error")):
        service.error = error
        with pytest.raises(anthropic.APIStatusError) as refused:
            await create(client)
        assert refused.value.status_code == status and refused.value.type == kind
    service.error, service.fails_after = None, 2
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        await stream(client)
    with pytest.raises(anthropic.InternalServerError, match="the step failed"):
        await create(client)
    async with httpx.AsyncClient(base_url=str(client.base_url), headers={"x-api-key": KEY}) as http:
        for path in ("/v1/messages", "/v1/messages/batches"):  # a wrong method, and a route that does not exist
            assert (await http.get(path)).json()["type"] == "error"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": "hi"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}], "messages[0].content[0].tool_use_id"),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}], "messages[0].content[0].input"),
        ("messages", [{"role": "user", "content": "x" * 600}], "messages"),
        ("system", 5, "system"),
        ("max_tokens", None, "max_tokens"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "tools[0].type"),
        ("tools", [{"name": "x"}], "tools[0].input_schema"),
        ("tools", [{"name": "x", "parameters": {}}], "tools[0].parameters"),
        ("tool_choice", {"type": "tool", "name": "nope"}, "tool_choice.name"),
        ("tool_choice", {"type": "some"}, "tool_choice.type"),
        ("thinking", {"type": "enabled", "budget": 5}, "thinking.budget"),
        ("output_config", {"format": {"type": "xml"}}, "output_config.format"),
        ("stop_sequences", [""], "stop_sequences"),
        ("temperature", 1000, "temperature"),
        ("container", {"id": "x"}, "container"),
        ("speed", "fast", "speed"),
        ("maxtokens", 5, "maxtokens"),
    ],
)
async def test_a_wrong_field_is_named(client: anthropic.AsyncAnthropic, field: str, value: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model="tiny", max_tokens=50, messages=USER, extra_body={"tools": [TOOL], field: value})
    assert refused.value.type == "invalid_request_error" and f"{named}=" in refused.value.message
