"""Requests that OpenAI's endpoints refuse: with status 4xx, in OpenAI's format and with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest
from live_http import asgi_client
from scripted_service import ScriptedService

from stoker.base.errors import RequestError
from stoker.server.protocols.openai.fields import TABLES

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
FORCED = {"type": "function", "function": {"name": "f"}}


async def refused(path: str, body: dict[str, Any], status: int = 400, **settings: Any) -> dict[str, Any]:
    service = ScriptedService()
    async with asgi_client(service, **settings) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert not service.requests, "the service receives no request"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field, values in {
            "max_tokens": [-1, 1.5, "3", True],
            "temperature": [-0.1, "hot"],
            "top_p": [1.01, 0],
            "top_k": [-2],
            "min_p": [2],
            "n": [0, 1000],
            "seed": [1 << 64, "x"],
            "presence_penalty": [3],
            "frequency_penalty": [-3],
            "repetition_penalty": [0],
            "logit_bias": [[1], {"a": 1}, {"1": 101}, {"1": None}],
            "stop": [5, [1], [""], ["x"] * 65],
            "stop_token_ids": [[-1], 3],
            "logprobs": [21, True],
            "echo": ["yes"],
            "stream": [1],
            "stream_options": [{"include_usage": True}],
            "suffix": ["end"],
            "best_of": [0],
            "model": [5],
            "prompt": [None, [], 7, [1, "a"], ["a", 1], [[1.5]], {"text": "hi"}, ["x"] * 257],
            "min_tokens": [17],
            "truncate_prompt_tokens": [-2, 1 << 30],
            "priority": ["high"],
            "timeout_s": [0],
            "request_id": [5],
            "bad_words": ["x"],
            "ignore_eos": [0],
            "detokenize": [0],
            "truncation_side": ["middle"],
            "return_token_ids": ["yes"],
            "allowed_token_ids": [[], [-1], 3, [1] * 20_000],
            "response_format": ["json"],
            "guided_choice": [[]],
            "guided_regex": [5],
            "user": [5],
            "metadata": [3],
        }.items()
        for value in values
    ],
)
async def test_an_invalid_value_is_refused_with_the_name_of_its_field(field: str, value: Any) -> None:
    error = await refused("/v1/completions", {"prompt": "hi", field: value})
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == field
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # the server has no tool parser
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"tool_choice": FORCED, "tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"detokenize": False, "stop": ["x"]}, "stop"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": "no"}}, "stream_options.include_obfuscation"),
    ],
)
async def test_invalid_chat_requests(fields: dict[str, Any], param: str) -> None:
    assert (await refused("/v1/chat/completions", {"messages": MESSAGES, **fields}))["param"] == param


@pytest.mark.parametrize(
    ("wrong", "right"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("Stop", "stop"), ("top-k", "top_k")]
)
async def test_an_unknown_field_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    error = await refused("/v1/completions", {"prompt": "hi", wrong: 1})
    assert error["param"] == wrong and right in error["message"]


async def test_an_unknown_model_is_not_found() -> None:
    error = await refused("/v1/completions", {"model": "gpt-5", "prompt": "hi"}, status=404)
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert "tiny" in error["message"]


async def test_best_of_below_n_or_with_stream() -> None:
    assert (await refused("/v1/completions", {"prompt": "hi", "n": 3, "best_of": 2}))["param"] == "best_of"
    assert (await refused("/v1/completions", {"prompt": "hi", "n": 1, "best_of": 2, "stream": True}))["param"] == "best_of"


async def test_null_counts_as_absent_everywhere() -> None:
    service = ScriptedService("!")
    async with asgi_client(service) as client:
        for path, known in (("/v1/completions", TABLES["completions"]), ("/v1/chat/completions", TABLES["chat"])):
            body: dict[str, Any] = dict.fromkeys(row.name for row in known) | {"prompt": "hi", "messages": MESSAGES}
            body.pop("messages" if path == "/v1/completions" else "prompt")
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text


def test_every_row_has_a_description_and_harmless_values_pass() -> None:
    for table in TABLES.values():
        for row in table:
            assert row.meaning if row.status == "accepted" else row.reason
            for value in row.harmless:
                assert table.check({row.name: value}) == {}


PAGE = "https://page.example"
SIMPLE = ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", None]


def typed(content_type: str | None) -> dict[str, str]:
    return {} if content_type is None else {"content-type": content_type}


@pytest.mark.parametrize("content_type", [*SIMPLE, "application/xml", "application/jsonp"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_openai_routes_read_json_only(path: str, content_type: str | None) -> None:
    service = ScriptedService()
    async with asgi_client(service) as client:
        answer = await client.post(path, content=b'{"prompt": "hi"}', headers=typed(content_type))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (415, "unsupported_media_type", "invalid_request_error")
    assert "application/json" in error["message"] and (content_type is None or content_type.split(";")[0] in error["message"])
    assert not service.requests


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
async def test_content_types_of_json(content_type: str) -> None:
    async with asgi_client(ScriptedService("!")) as client:
        answer = await client.post("/v1/completions", content=b'{"prompt": "hi"}', headers=typed(content_type))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("content_type", SIMPLE)
@pytest.mark.parametrize(
    "path", ["/invocations", "/v2/models/tiny/generate", "/v1/models/tiny:predict", "/v2/repository/models/tiny/unload"]
)
async def test_a_web_page_cannot_post_without_preflight(path: str, content_type: str | None) -> None:
    """Clients of these protocols post with any content type; browsers add Origin, and send no preflight request for these types."""
    body = b'{"inputs": "hi", "text_input": "hi", "prompt": "hi", "max_tokens": 2}'
    service = ScriptedService("!")
    async with asgi_client(service) as client:
        answer = await client.post(path, content=body, headers={"origin": PAGE, **typed(content_type)})
        assert answer.status_code == 415 and "application/json" in answer.text
        assert not service.requests
        allowed = await client.post(path, content=body, headers=typed(content_type))
        assert allowed.status_code != 415
    async with asgi_client(ScriptedService("!"), cors_origins=(PAGE,)) as client:
        allowed = await client.post(path, content=body, headers={"origin": PAGE, **typed(content_type)})
        assert allowed.status_code != 415


@pytest.mark.parametrize(
    ("path", "body", "field", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "prompt", "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5}, "max_tokens", "max_tokens"),
        ("/v1/completions", {"prompt": "hi", "n": 2, "use_beam_search": True}, "beam_width", "n"),
        ("/v1/completions", {"prompt": "hi", "best_of": 2, "use_beam_search": True}, "beam_width", "best_of"),
        ("/v1/completions", {"prompt": "hi"}, "prompt", "prompt"),
    ],
)
async def test_errors_of_the_service_name_what_the_client_sent(path: str, body: dict[str, Any], field: str, param: str) -> None:
    service = ScriptedService()
    service.error = RequestError(field, 7, "it is too large", cure="Use less.")
    async with asgi_client(service) as client:
        error = (await client.post(path, json=body)).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}=") and error["message"].endswith("it is too large. Use less.")
