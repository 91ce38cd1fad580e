"""The real `openai` client over a loopback socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from live_http import live_server
from scripted_service import ScriptedService

from stoker.base.errors import QueueFullError

pytestmark = pytest.mark.compatibility(protocol="OpenAI", client="openai", feature="models, completions, chat, streams, tool calls, errors")

KEY = "secret-key-1"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService("Hello, wörld 🎉!", "second", max_output_len=1024)


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        live_server(service, api_keys=(KEY,), tool_parser="hermes", reasoning_parser="qwen3") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


async def test_completions(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="tiny", prompt="hi", max_tokens=50, n=2, logprobs=1)
    assert [choice.text for choice in whole.choices] == ["Hello, wörld 🎉!", "second"]
    assert (
        whole.usage is not None and whole.usage.prompt_tokens_details is not None and whole.usage.prompt_tokens_details.cached_tokens == 2
    )
    text = ["", ""]
    async for chunk in await client.completions.create(model="tiny", prompt="hi", max_tokens=50, n=2, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.text
    assert text == ["Hello, wörld 🎉!", "second"]


async def test_chat(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)  # type: ignore[arg-type, call-overload]
    assert whole.choices[0].message.content == "Hello, wörld 🎉!" and len(whole.choices[0].logprobs.content) == 19
    text, finishes, usage = "", [], None
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == "Hello, wörld 🎉!" and finishes == ["stop"] and usage == whole.usage


async def test_tools_with_the_client_s_accumulator(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.answers = ['<think>hm</think><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>']
    async with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
    assert message.tool_calls[0].function.name == "weather" and message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


async def test_errors_are_exceptions_of_the_client(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="hi", temperature=-1)
    assert bad.value.param == "temperature" and bad.value.code == "bad_request"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="hi")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong-key").models.list()
    service.error = QueueFullError(1, 1, 1.0)
    with pytest.raises(openai.RateLimitError) as full:
        await client.completions.create(model="tiny", prompt="hi", stream=True)
    assert full.value.response.headers["retry-after"] == "1"
    service.error, service.fails_after = None, 1
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="tiny", prompt="hi")
    with pytest.raises(openai.APIError, match="the step failed"):
        async for _ in await client.completions.create(model="tiny", prompt="hi", stream=True):
            pass


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
