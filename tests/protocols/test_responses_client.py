"""The Responses API with the real `openai` client over a loopback socket. Each event is checked against the client's models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from live_http import asgi_client, live_server, until
from openai.types.responses import Response, ResponseStreamEvent
from scripted_service import ScriptedService, make_context

from stoker.base.errors import ConfigError, QueueFullError
from stoker.server.application import make_app
from stoker.server.state_directory import StateDirectory

pytestmark = pytest.mark.compatibility(
    protocol="OpenAI", client="openai", feature="Responses: streams, tools, reasoning items, stored responses, background"
)

KEY = "secret-key-1"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOL: Any = {"type": "function", "name": "weather", "description": "now", "parameters": SCHEMA, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService("Hello, wörld 🎉!", max_output_len=1024, max_input_len=512)


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        live_server(service, api_keys=(KEY,), tool_parser="hermes", reasoning_parser="qwen3") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def checked(response: Any) -> dict[str, Any]:
    """The JSON of a response, which the client's models accept strictly."""
    value = response.model_dump(mode="json", exclude_unset=True)
    Response.model_validate(value)
    return value  # type: ignore[no-any-return]


async def collect(client: openai.AsyncOpenAI, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """All events of a streamed response, and the response of the last one."""
    stream = await client.responses.create(model="tiny", stream=True, **fields)
    collected = [EVENT.validate_python(event.model_dump(exclude_unset=True)) async for event in stream]
    assert [event.sequence_number for event in collected] == list(range(len(collected)))
    return collected, checked(collected[-1].response)


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


async def test_text(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    response = await client.responses.create(model="tiny", input="hi", instructions="be brief", max_output_tokens=50, temperature=0.5)
    assert response.output_text == "Hello, wörld 🎉!" and response.status == "completed" and response.error is None
    assert service.rendered[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert service.requests[0].params.max_tokens == 50 and service.requests[0].params.temperature == 0.5
    body = checked(response)
    assert body["usage"] == {
        "input_tokens": len("<system>be brief<user>hi<assistant>"),
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 19,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("<system>be brief<user>hi<assistant>") + 19,
    }


async def test_the_stream_is_the_whole_response(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.answers = [f"<think>hmm 🤔</think>I look.\n{CALL}{CALL.replace('Oslo', 'Rome')}"]
    fields: dict[str, Any] = {"input": "hi", "tools": [TOOL]}
    whole = checked(await client.responses.create(model="tiny", **fields))
    for group in (1, 7, 1000):
        service.group = group
        collected, streamed = await collect(client, **fields)
        assert without_ids(streamed["output"]) == without_ids(whole["output"])
        assert streamed["usage"] == whole["usage"] and streamed["status"] == whole["status"] == "completed"
        kinds = [event.type for event in collected]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        for i, item in enumerate(streamed["output"]):
            own = [event for event in collected if getattr(event, "output_index", None) == i]
            assert own[0].type == "response.output_item.added" and own[-1].type == "response.output_item.done"
            assert own[-1].item.model_dump(mode="json", exclude_unset=True) == item
            deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
            assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hmm 🤔"}]
    assert json.loads(whole["output"][3]["arguments"]) == {"city": "Rome"}
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hmm 🤔".encode())


async def test_the_client_s_accumulator_and_parser(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    class City(pydantic.BaseModel):
        city: str

    service.answers = ['{"city": "Oslo"}']
    async with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_parsed == City(city="Oslo")
    guide = service.requests[0].params.guide
    assert guide is not None and json.loads(guide.text)["properties"]["city"]["type"] == "string"
    assert (await client.responses.parse(model="tiny", input="hi", text_format=City)).output_parsed == City(city="Oslo")


async def test_a_tool_loop_with_previous_response_id(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.answers = [f"<think>look</think>{CALL}"]
    first = await client.responses.create(model="tiny", input="weather?", instructions="first only", tools=[TOOL])
    call = first.output[1]
    assert call.type == "function_call" and call.name == "weather"
    service.answers = ["Sunny."]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"}
    second = await client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert second.output_text == "Sunny." and second.previous_response_id == first.id
    messages = service.rendered[-1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]  # without the first instructions
    assert messages[1]["reasoning_content"] == "look" and messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[2] == {"role": "tool", "tool_call_id": call.call_id, "name": "weather", "content": "20 °C"}
    third = await client.responses.create(model="tiny", input="thanks", previous_response_id=second.id)
    assert [message["role"] for message in service.rendered[-1][0]] == ["user", "assistant", "tool", "assistant", "user"]
    listed = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]  # several pages
    assert [item.type for item in listed] == ["message", "reasoning", "function_call", "function_call_output", "message", "message"]


async def test_the_output_of_one_request_is_the_input_of_the_next(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    """store=false with the items sent back, as agents do."""
    service.answers = [f"<think>look</think>Wait.{CALL}"]
    first = await client.responses.create(
        model="tiny", input="weather?", tools=[TOOL], store=False, include=["reasoning.encrypted_content"]
    )
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        await client.responses.retrieve(first.id)
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}, *first.output]
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": [{"type": "input_text", "text": "20"}]}  # type: ignore[union-attr]
    await client.responses.create(model="tiny", input=[*history, output, {"role": "developer", "content": "brief"}], tools=[TOOL])
    user, assistant, tool, system = service.rendered[-1][0]
    assert user["content"] == "weather?" and tool["content"] == "20" and system == {"role": "system", "content": "brief"}
    assert assistant["content"] == "Wait." and assistant["reasoning_content"] == "look" and len(assistant["tool_calls"]) == 1


async def test_tool_choice(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.answers = ['{"city": "Oslo"}']
    forced = await client.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert [item.type for item in forced.output] == ["function_call"]
    service.answers = ['[{"name": "weather", "parameters": {"city": "Oslo"}}]']
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    for choice in ("required", allowed):
        response = await client.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice=choice)
        assert response.output[0].type == "function_call" and response.output[0].arguments == '{"city": "Oslo"}'
    service.answers = [CALL]
    none = await client.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice="none")
    assert none.output_text == CALL and service.rendered[-1][1]["tools"] is None


@pytest.mark.parametrize(
    ("answer", "max_tokens", "kind"), [("<think>long</think>", 10, "reasoning"), ("some text", 5, "message"), (CALL, 60, "function_call")]
)
async def test_an_answer_that_is_cut_off(
    client: openai.AsyncOpenAI, service: ScriptedService, answer: str, max_tokens: int, kind: str
) -> None:
    service.answers = [answer]
    collected, response = await collect(client, input="hi", tools=[TOOL], max_output_tokens=max_tokens)
    assert collected[-1].type == "response.incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["type"] == kind and response["output"][-1]["status"] == "incomplete"
    continued = await client.responses.create(model="tiny", input="go on", previous_response_id=response["id"])
    assert continued.previous_response_id == response["id"]


async def test_an_empty_answer_is_an_empty_message(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.answers = ["<think></think>"]
    _, response = await collect(client, input="hi")
    assert response["output"][0]["content"][0]["text"] == "" and response["output"][0]["status"] == "completed"


async def test_log_probabilities(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    include: Any = ["message.output_text.logprobs"]
    collected, response = await collect(client, input="hi", include=include, top_logprobs=2)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 19 and len(logprobs[0]["top_logprobs"]) == 2 and logprobs[0]["bytes"] == [72]
    deltas = [entry for event in collected if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry["token"] for entry in logprobs]


async def test_stored_responses(client: openai.AsyncOpenAI) -> None:
    created = await client.responses.create(model="tiny", input="hi", metadata={"a": "b"})
    assert checked(await client.responses.retrieve(created.id)) == checked(created) and created.metadata == {"a": "b"}
    await client.responses.delete(created.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as missing:
            await call(created.id)
        assert missing.value.code == "response_not_found"
    _, streamed = await collect(client, input="hi")
    assert checked(await client.responses.retrieve(streamed["id"])) == streamed
    with pytest.raises(openai.BadRequestError, match="background=true"):
        await client.responses.cancel(streamed["id"])


async def test_background(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.hold = asyncio.Event()
    queued = await client.responses.create(model="tiny", input="hi", background=True)
    assert queued.status == "queued"
    await until(lambda: service.num_streaming == 1)
    assert (await client.responses.retrieve(queued.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        await client.responses.create(model="tiny", input="hi", previous_response_id=queued.id)
    cancelled = await client.responses.create(model="tiny", input="hi", background=True)
    await until(lambda: service.num_streaming == 2)
    assert (await client.responses.cancel(cancelled.id)).status == "cancelled"
    await until(lambda: service.num_streaming == 1)
    service.hold.set()
    await until(lambda: service.num_streaming == 0)
    done = await client.responses.retrieve(queued.id)
    assert done.status == "completed" and done.output_text == "Hello, wörld 🎉!"
    assert (await client.responses.retrieve(cancelled.id)).status == "cancelled"
    service.error = QueueFullError(1, 1, 1.0)
    refused = await client.responses.create(model="tiny", input="hi", background=True)
    await until(lambda: len(service.requests) == 3)
    failed = await client.responses.retrieve(refused.id)
    assert failed.status == "failed" and failed.error is not None and failed.error.code == "rate_limit_exceeded"
    Response.model_validate(failed.model_dump(exclude_unset=True))


async def test_failures(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.fails_after = 2
    with pytest.raises(openai.InternalServerError, match="the step failed"):
        await client.responses.create(model="tiny", input="hi")
    collected, response = await collect(client, input="hi")
    assert collected[-1].type == "response.failed" and response["error"]["message"] == "the step failed."
    assert response["output"][0]["content"][0]["text"] == "He"
    service.fails_after, service.error = None, QueueFullError(1, 1, 1.0)
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="tiny", input="hi", stream=True)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", [], "input"),
        ("input", [{"role": "robot", "content": "hi"}], "input[0].role"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ("input", [{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ("input", [{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ("input", "x" * 600, "input"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("tools", [{"type": "function", "name": "f", "params": {}}], "tools[0].params"),
        ("tool_choice", {"type": "function", "name": "nope"}, "tool_choice"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "text.format.schema"),
        ("reasoning", {"depth": 1}, "reasoning.depth"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", -1, "temperature"),
        ("top_logprobs", 3, "top_logprobs"),
        ("metadata", {str(i): "" for i in range(17)}, "metadata"),
        ("conversation", "conv_1", "conversation"),
        ("prompt", {"id": "pmpt_1"}, "prompt"),
        ("include", ["everything"], "include[0]"),
        ("truncation", "some", "truncation"),
        ("tool_chioce", "auto", "tool_chioce"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    ],
)
async def test_a_wrong_field_is_named(client: openai.AsyncOpenAI, field: str, value: Any, param: str) -> None:
    body: dict[str, Any] = {"input": "hi", "tools": [TOOL], field: value}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="tiny", extra_body=body)
    assert refused.value.param == param


async def test_truncation_drops_the_oldest_messages(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    turns: Any = [{"role": role, "content": role[0] * 60} for _ in range(5) for role in ("user", "assistant")]
    body: Any = [{"role": "system", "content": "s"}, *turns, {"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError, match="max_input_len"):
        await client.responses.create(model="tiny", input=body)
    await client.responses.create(model="tiny", input=body, truncation="auto")
    messages = service.rendered[-1][0]
    assert messages[0]["role"] == "system" and messages[1]["role"] == "user" and messages[-1]["content"] == "last"
    assert 3 < len(messages) < len(body) and len(service.requests[-1].prompt) <= 512


async def test_input_tokens_and_reasoning_effort(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    counted = await client.responses.input_tokens.count(model="tiny", input="hi", instructions="x", tools=[TOOL])
    assert counted.input_tokens == len("<system>x<user>hi<assistant>") and counted.object == "response.input_tokens"
    await client.responses.create(model="tiny", input="hi", reasoning={"effort": "none"})
    assert service.rendered[-1][1]["enable_thinking"] is False
    await client.responses.create(model="tiny", input="hi", reasoning={"effort": "low", "summary": "auto"})
    assert service.rendered[-1][1]["reasoning_effort"] == "low"


async def test_the_store_is_bounded(tmp_path: Path) -> None:
    async with asgi_client(ScriptedService("ok", max_input_len=10_000_000), max_stored_bytes=1 << 20) as http:

        async def create(text: str) -> str:
            return str((await http.post("/v1/responses", json={"input": text})).json()["id"])

        async def status(response_id: str) -> int:
            return (await http.get(f"/v1/responses/{response_id}")).status_code

        first = [await create("hi"), await create("x" * 500_000)]
        assert [await status(each) for each in first] == [200, 200]
        second = [await create("x" * 300_000) for _ in range(2)]
        assert [await status(each) for each in (*first, *second)] == [404, 404, 200, 200]  # the oldest ones are deleted
        larger_than_all = await create("x" * 2_000_000)
        assert [await status(each) for each in (*second, larger_than_all)] == [404, 404, 200]


async def test_another_server_on_the_same_directory(tmp_path: Path) -> None:
    service, settings = ScriptedService("ok"), {"state_dir": str(tmp_path / "state")}
    context = await make_context(service, **settings)
    transport = httpx.ASGITransport(make_app(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://stoker") as http:
        done = (await http.post("/v1/responses", json={"input": "hi"})).json()
        service.hold = asyncio.Event()
        waiting = (await http.post("/v1/responses", json={"input": "hi", "background": True})).json()
        async with asgi_client(service, **settings) as other:  # another frontend process
            assert (await other.get(f"/v1/responses/{done['id']}")).json() == done
            assert (await other.get(f"/v1/responses/{waiting['id']}")).json()["status"] in ("queued", "in_progress")
            context.state_directory().close()  # the first one ends
            failed = (await other.get(f"/v1/responses/{waiting['id']}")).json()
            assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
        service.hold.set()


def test_a_state_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state_dir=.*can write"):
        StateDirectory(str(tmp_path / "file"))
