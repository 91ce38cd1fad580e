"""Bodies with extreme values: none of them makes the server fail."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from live_http import asgi_client
from scripted_service import ScriptedService

from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.protocols.truss.options import TrussOptions

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
INVOKE = "/invocations"
PREDICT = "/v1/models/model:predict"
JSON = {"content-type": "application/json"}
PACKED = {"content-type": "application/octet-stream"}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 5000, "1" * 5000])
async def test_arguments_of_earlier_calls_that_are_not_json(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    body = {"messages": [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    async with asgi_client(ScriptedService()) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("name", ["self", "cls", "messages_", "template_values"])
async def test_variables_of_the_template_may_have_any_name(name: str) -> None:
    service = ScriptedService()
    async with asgi_client(service) as client:
        answer = await client.post(CHAT, json={"messages": USER, "chat_template_kwargs": {name: 1}})
    assert answer.status_code == 200 and service.rendered[-1][1][name] == 1


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/tokenize", INVOKE, PREDICT, "/v2/models/ensemble/generate"])
async def test_nesting_near_the_limit_of_the_parser(path: str) -> None:
    async with asgi_client(ScriptedService()) as client:
        for depth in range(900, 1000):
            body = f'{{"prompt": "hi", "inputs": "hi", "text_input": "hi", "max_tokens": {nested(depth)}, "parameters": {nested(depth)}}}'
            answer = await client.post(path, content=body, headers=JSON)
            assert 400 <= answer.status_code < 500 or b"data" in answer.content or b"JSON buffer" in answer.content, answer.text


@pytest.mark.parametrize("dtype", [[], {}, ["BYTES"], {"a": 1}, 1, None])
async def test_invalid_datatypes(dtype: Any) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": dtype, "shape": [1, 1], "data": ["hi"]}]}
    async with asgi_client(ScriptedService()) as client:
        answer = await client.post("/v2/models/ensemble/infer", json=body)
    assert answer.status_code == 400 and answer.json() == {"error": "invalid datatype for input text_input"}


@pytest.mark.parametrize("options", [TrussOptions(), TrussOptions(openai=True)], ids=["legacy", "openai"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "hi", "stop": "\\ud800"}', "surrogate"),
        (b'{"prompt": "hi", "\\udfff": 1}', "surrogate"),
        (b'{"prompt": "hi", "messages": [{"\\ud800": 1}]}', "surrogate"),
        (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "limit"),
    ],
)
async def test_json_that_only_python_accepts(options: TrussOptions, body: bytes, message: str) -> None:
    async with asgi_client(ScriptedService(), protocols=("truss",), options=options) as client:
        answer = await client.post(PREDICT, content=body)
    assert answer.status_code == 400 and message in answer.json()["error"]


@pytest.mark.parametrize("value", [b"x", {1: 2}, {"a": {b"x": 1}}, [msgspec.msgpack.Ext(5, b"x")], [{"a": b"x"}]])
async def test_msgpack_that_json_cannot_represent(value: Any) -> None:
    async with asgi_client(ScriptedService(), protocols=("truss",), options=TrussOptions(openai=True)) as client:
        for name in ("chat_template_kwargs", "logit_bias", "guided_json", "structured_outputs", "prompt"):
            body = msgspec.msgpack.encode({"messages": USER, name: value})
            answer = await client.post(PREDICT, content=body, headers=PACKED)
            assert (answer.status_code, answer.json()) == (400, {"error": "unsupported payload"})


AROUND_CALLS = {
    "mistral": ("[TOOL_CALLS][", "]"),
    "llama3": ("", ""),
    "llama4_pythonic": ("[f(a=", ")]"),
    "qwen3_coder": ("<tool_call><function=f><parameter=a>", "</parameter></function></tool_call>"),
    "glm45": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>"),
    "minimax_m1": ("<tool_calls>", "</tool_calls>"),
    "minimax_m2": ('<minimax:tool_call><invoke name="f"><parameter name="a">', "</parameter></invoke></minimax:tool_call>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "gpt_oss": ("<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
    "granite": ("<|tool_call|>[", "]"),
    "internlm": ("<|action_start|><|plugin|>", "<|action_end|>"),
    "xlam": ("[", "]"),
    "jamba": ("<tool_calls>[", "]</tool_calls>"),
    "phi4_mini": ("functools[", "]"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", list(TOOL_PARSERS))
@pytest.mark.parametrize(
    "inner", ["[" * 3000, '{"name": "f", "arguments": {"x": "\\ud800 \\ude00"}}', '{"name": "\\ud800", "parameters": "\\ud83c\\udf89"}']
)
async def test_models_that_generate_hostile_calls(parser: str, inner: str, stream: bool) -> None:
    """Nesting beyond the limit of the parser, and lone surrogates: the response is still valid."""
    prefix, suffix = AROUND_CALLS.get(parser, ("<tool_call>", "</tool_call>"))
    service = ScriptedService(prefix + inner + suffix, group=500, max_output_len=8000, max_input_len=8000)
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": USER, "tools": tools, "max_tokens": 8000, "stream": stream}
    async with asgi_client(service, tool_parser=parser) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]] if stream else [answer.json()]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "tool_calls")
