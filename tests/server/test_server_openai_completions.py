"""/v1/completions: every form of prompt and response, and the joined stream equals the whole response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from live_http import asgi_client, events
from scripted_service import CACHED, ScriptedService

from stoker.base.errors import RequestError
from stoker.base.types import Delta, GenerationRequest


async def post(service: ScriptedService, body: dict[str, Any], **settings: Any) -> Any:
    async with asgi_client(service, **settings) as client:
        answer = await client.post("/v1/completions", json={"max_tokens": 64, **body})
        assert answer.status_code == 200, answer.text
        return events(answer.text) if body.get("stream") else answer.json()


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices by index. Each has exactly one finish_reason, in its last chunk."""
    assert chunks[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        assert chunk["object"] == "text_completion"
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "finish_reason": None, "logprobs": None})
            assert choice["finish_reason"] is None, "a choice has no chunk after its finish_reason"
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    choice["logprobs"][name] += values
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


async def test_a_whole_response() -> None:
    answer = await post(ScriptedService("Hello, wörld 🎉!"), {"prompt": "hi"})
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["choices"] == [{"index": 0, "text": "Hello, wörld 🎉!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    size = len("Hello, wörld 🎉!".encode())
    details = {"cached_tokens": CACHED}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": size, "total_tokens": 3 + size, "prompt_tokens_details": details}


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi"},
        {"prompt": "hi", "n": 3},
        {"prompt": ["one", "two"], "n": 2},
        {"prompt": [[65, 66], [67]]},
        {"prompt": [65, 66, 67], "echo": True},
        {"prompt": "hi", "logprobs": 2},
        {"prompt": "hi", "logprobs": 1, "echo": True, "n": 2},
        {"prompt": ["a", "b"], "logprobs": 0, "echo": True, "max_tokens": 0},
    ],
)
async def test_the_joined_stream_equals_the_whole_response(body: dict[str, Any], group: int) -> None:
    answers = ("Hello, wörld 🎉!", "né", "third answer")
    whole = await post(ScriptedService(*answers, group=group), body)
    streamed = await post(ScriptedService(*answers, group=group), {**body, "stream": True, "stream_options": {"include_usage": True}})
    choices = joined(streamed)
    assert sorted(choices) == [choice["index"] for choice in whole["choices"]] == list(range(len(choices)))
    for choice in whole["choices"]:
        assert choices[choice["index"]] == {name: choice[name] for name in ("text", "finish_reason", "logprobs")}
    *chunks, last, _ = streamed
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_usage_in_every_chunk_increases_to_the_total() -> None:
    body = {"prompt": ["one", "two"], "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, _ = await post(ScriptedService("abcdef"), body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] == 8


async def test_without_include_usage_no_chunk_has_usage() -> None:
    assert all("usage" not in chunk for chunk in (await post(ScriptedService(), {"prompt": "hi", "stream": True}))[:-1])


async def test_choices_are_numbered_by_prompt_and_then_by_n() -> None:
    service = ScriptedService("first", "second")
    answer = await post(service, {"prompt": ["a", "b", "c"], "n": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["first", "second"] * 3
    assert [request.prompt for request in service.requests] == ["a", "b", "c"]
    assert len({request.request_id for request in service.requests}) == 3
    assert answer["usage"]["completion_tokens"] == 3 * len("firstsecond") and answer["usage"]["prompt_tokens"] == 6


async def test_best_of_returns_the_highest_mean_log_probability() -> None:
    # Each token of sequence i has the log-probability -(i + 1) ÷ 4, so the first sequences are the best.
    service = ScriptedService("best", "good", "bad")
    answer = await post(service, {"prompt": "hi", "best_of": 3, "n": 2, "temperature": 1})
    assert service.requests[0].params.n == 3
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [(0, "best", None), (1, "good", None)]
    assert answer["usage"]["completion_tokens"] == len("bestgoodbad"), "all generated tokens are counted"


async def test_echo_returns_the_prompt_after_truncation() -> None:
    assert (await post(ScriptedService("!"), {"prompt": "hi", "echo": True}))["choices"][0]["text"] == "hi!"
    assert (await post(ScriptedService("!"), {"prompt": [104, 105], "echo": True}))["choices"][0]["text"] == "hi!"
    truncated = await post(ScriptedService("!"), {"prompt": "abcdef", "echo": True, "truncate_prompt_tokens": 2})
    assert truncated["choices"][0]["text"] == "ef!"


async def test_scoring_a_prompt_returns_no_generated_text() -> None:
    service = ScriptedService("never shown")
    answer = await post(service, {"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": 1})
    choice = answer["choices"][0]
    assert service.requests[0].params.max_tokens == 1 and service.requests[0].params.prompt_logprobs == 1
    assert choice["text"] == "hi" and choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["\x02", "h", "i"] and choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1], "the text does not contain the tokenizer's prefix"


async def test_logprobs_of_tokens_that_are_part_of_a_character() -> None:
    answer = await post(ScriptedService("é"), {"prompt": "hi", "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xc3": -0.25, "D": -1.25}


async def test_prompt_logprobs_are_by_token_id() -> None:
    answer = await post(ScriptedService("!"), {"prompt": "hi", "prompt_logprobs": 1})
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {"104": {"logprob": -0.25, "rank": 1, "decoded_token": "h"}},
        {"105": {"logprob": -0.25, "rank": 1, "decoded_token": "i"}},
    ]


async def test_every_sampling_field_reaches_the_request() -> None:
    service = ScriptedService("!")
    sent = {
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "n": 2,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "6": 2.5},
        "allowed_token_ids": [3, 4],
        "stop": "x",
        "stop_token_ids": [9],
        "bad_words": ["bad"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -1,
        "timeout_s": 5,
        "request_id": "mine",
        "cache_salt": "salt",
        "add_special_tokens": False,
        "truncate_prompt_tokens": -1,
    }
    answer = await post(service, {"prompt": "hi", **sent})
    request = service.requests[0]
    params = request.params
    assert answer["id"] == "cmpl-mine"
    assert (params.min_tokens, params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (1, 0.5, 0.9, 5, 0.1, 7)
    assert (params.n, params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (2, 1, -1, 1.5)
    assert params.logit_bias == {5: -100.0, 6: 2.5} and params.stop == ("x",) and params.stop_token_ids == (9,)
    assert params.allowed_token_ids == (3, 4)
    assert params.bad_words == (tuple(b"bad"), tuple(b" bad"))
    assert params.ignore_eos and params.include_stop and not params.skip_special_tokens
    assert (request.priority, request.timeout_s, request.cache_salt, request.add_special_tokens) == (-1, 5.0, "salt", False)
    assert request.truncate_prompt_tokens == service.info.limits.max_input_len


async def test_defaults_of_openai() -> None:
    service = ScriptedService("!")
    async with asgi_client(service) as client:
        await client.post("/v1/completions", json={"prompt": "hi", "top_k": -1, "stop": None})
    params = service.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.n) == (16, 1.0, 1.0, 0, 1)


async def test_the_settings_provide_defaults() -> None:
    service = ScriptedService("!")
    async with asgi_client(service, default_max_tokens=5, request_timeout_s=9.0, skip_special_tokens=False) as client:
        await client.post("/v1/completions", json={"prompt": "hi"})
    request = service.requests[0]
    assert (request.params.max_tokens, request.timeout_s, request.params.skip_special_tokens) == (5, 9.0, False)


async def test_beam_search_does_not_sample() -> None:
    service = ScriptedService("a", "b")
    await post(service, {"prompt": "hi", "use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.5, "early_stopping": True})
    params = service.requests[0].params
    assert (params.beam_width, params.n, params.temperature, params.length_penalty, params.early_stopping) == (4, 2, 0.0, 0.5, True)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            "json_schema",
            '{"type":"object"}',
        ),
        ({"guided_json": {"type": "integer"}}, "json_schema", '{"type":"integer"}'),
        ({"guided_json": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]'),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"regex": "b"}}, "regex", "b"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type":"object"}'),
    ],
)
async def test_fields_that_set_a_grammar(fields: dict[str, Any], kind: str, text: str) -> None:
    service = ScriptedService("!")
    await post(service, {"prompt": "hi", **fields})
    guide = service.requests[0].params.guide
    assert guide is not None and (guide.kind, guide.text) == (kind, text)


class RefusesLate(ScriptedService):
    """Refuses the prompt "late" after the stream of another prompt has started."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.started = asyncio.Event()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        if request.prompt == "late":
            await self.started.wait()
            raise RequestError("prompt", request.prompt, "it is late")
        async for deltas in super().stream(request):
            yield deltas
            self.started.set()


async def test_a_prompt_that_is_refused_after_the_start_ends_the_stream_with_an_error() -> None:
    service = RefusesLate("abc")
    *chunks, error, done = await post(service, {"prompt": ["fine", "late"], "stream": True})
    assert chunks[0]["choices"][0]["text"] == "a" and done == "[DONE]"
    assert error["error"]["param"] == "prompt[1]" and error["error"]["type"] == "invalid_request_error"
    assert service.num_streaming == 0


async def test_a_refused_prompt_refuses_the_request() -> None:
    service = ScriptedService("abc")
    async with asgi_client(service) as client:
        for stream in (True, False):
            answer = await client.post("/v1/completions", json={"prompt": ["fine", "x" * 300], "stream": stream})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt[1]" and service.num_streaming == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_min_tokens_is_compared_with_max_tokens_of_the_request(path: str) -> None:
    service = ScriptedService("abc")
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with asgi_client(service) as client:
        assert (await client.post(path, json={**body, "min_tokens": 50, "max_tokens": 100})).status_code == 200
        for refused in ({"min_tokens": 50, "max_tokens": 20}, {"max_tokens": 0}):
            answer = await client.post(path, json={**body, **refused})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(refused))
    assert [request.params.min_tokens for request in service.requests] == [50]
