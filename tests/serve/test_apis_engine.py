"""The Responses API, batches, Anthropic's and Ollama's APIs with a real engine and two frontend processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from stoker.cli.server_process import running_server

OPTIONS = ["--num-frontends", "2", "--tool-parser", "hermes", "--model-name", "tiny", "--kv-cache-tokens", "4096"]
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(tiny_engine: Path) -> Iterator[str]:
    with running_server(tiny_engine, OPTIONS) as address:
        yield address


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def retrieve_often(client: openai.OpenAI, response_id: str) -> None:
    """New connections reach both frontend processes."""
    for _ in range(6):
        with client_of(str(client.base_url).removesuffix("/v1/")) as other:
            assert other.responses.retrieve(response_id).id == response_id


def test_responses(url: str) -> None:
    with client_of(url) as client:
        first = client.responses.create(model="tiny", input="hello", max_output_tokens=8, temperature=0)
        assert first.usage is not None and 0 < first.usage.output_tokens <= 8
        retrieve_often(client, first.id)
        with client.responses.stream(model="tiny", input="hello", max_output_tokens=8, temperature=0) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == first.output_text
        tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
        called = client.responses.create(
            model="tiny", input="more", previous_response_id=first.id, tools=[tool], tool_choice={"type": "function", "name": "weather"}
        )
        assert called.output[0].type == "function_call" and json.loads(called.output[0].arguments)["unit"] in ("C", "F")
        running = client.responses.create(model="tiny", input="hello", background=True, max_output_tokens=16)
        assert client.responses.cancel(running.id).status in ("cancelled", "incomplete", "completed")


def test_messages(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        whole = client.messages.create(model="tiny", max_tokens=8, messages=USER, extra_body={"temperature": 0})
        with client.messages.stream(model="tiny", max_tokens=8, messages=USER, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == "".join(block.text for block in whole.content if block.type == "text")
        tool: Any = {"name": "weather", "input_schema": SCHEMA}
        forced = client.messages.create(model="tiny", max_tokens=60, messages=USER, tools=[tool], tool_choice={"type": "any"})
        (call,) = [block for block in forced.content if block.type == "tool_use"][:1]
        assert call.name == "weather" and call.input["unit"] in ("C", "F")
        counted = client.messages.count_tokens(model="tiny", messages=USER)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_ollama(url: str) -> None:
    client, greedy = ollama.Client(host=url), {"num_predict": 8, "temperature": 0}
    whole = client.chat("tiny", USER, options=greedy)
    assert "".join(part.message.content or "" for part in client.chat("tiny", USER, options=greedy, stream=True)) == whole.message.content
    answer = client.generate("tiny", "hello", options={"num_predict": 60}, format=SCHEMA)
    assert json.loads(answer.response or "")["unit"] in ("C", "F")
    assert client.list().models[0].model == "tiny" and client.show("tiny").template


def test_a_batch(url: str) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
    lines = [json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body}) for i in range(12)]
    with client_of(url) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            time.sleep(0.05)
        assert batch.status == "completed" and batch.output_file_id is not None and batch.usage is not None
        results = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(int(result["custom_id"]) for result in results) == list(range(12)) and batch.usage.output_tokens == 12 * 8


def test_pages(url: str) -> None:
    assert httpx.get(f"{url}/docs").status_code == httpx.get(f"{url}/").status_code == 200
