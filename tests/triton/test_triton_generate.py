"""generate and generate_stream of the ensemble, with a scripted service."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_http import asgi_client
from scripted_service import ScriptedService

from stoker.base.errors import QueueFullError
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models

GENERATE, STREAM = "/v2/models/ensemble/generate", "/v2/models/ensemble/generate_stream"
COMMON = {
    "context_logits": 0.0,
    "cum_log_probs": 0.0,
    "generation_logits": 0.0,
    "model_name": "ensemble",
    "model_version": "1",
    "output_log_probs": 0.0,
    "sequence_end": False,
    "sequence_id": 0,
    "sequence_start": False,
    "batch_index": 0,
    "sequence_index": 0,
}
OK = {"text_input": "hi", "max_tokens": 3}


async def call(method: str, path: str, body: Any = None, service: ScriptedService | None = None, **settings: Any) -> tuple[int, str, str]:
    """(status, content type, text)"""
    async with asgi_client(service or ScriptedService("abc"), **settings) as client:
        content = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
        answer = await client.request(method, path, **content)
        return answer.status_code, answer.headers["content-type"], answer.text


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/ensemble/ready", "/v2/models/tiny/versions/1/ready"])
async def test_health(path: str) -> None:
    assert await call("GET", path) == (200, "text/plain", "")


async def test_not_ready() -> None:
    service = ScriptedService()
    service.is_ready = False
    assert await call("GET", "/v2/health/ready", service=service) == (503, "text/plain", "")
    assert await call("GET", "/v2/health/live", service=service) == (200, "text/plain", "")
    not_ready = (400, "text/plain", '{"error":"Model version not ready"}')
    assert await call("GET", "/v2/models/ensemble/ready", service=service) == not_ready
    assert await call("GET", "/v2/models/nope/ready") == not_ready
    assert await call("GET", "/v2/models/tiny/versions/9/ready") == not_ready


async def test_generate_responds_with_sorted_keys() -> None:
    status, kind, text = await call("POST", GENERATE, OK)
    assert (status, kind) == (200, "application/json")
    assert text == (
        '{"batch_index":0,"context_logits":0.0,"cum_log_probs":0.0,"finish_reason":"stop","generation_logits":0.0,'
        '"model_name":"ensemble","model_version":"1","output_log_probs":0.0,"sequence_end":false,"sequence_id":0,'
        '"sequence_index":0,"sequence_start":false,"text_output":"hiabc"}'
    )


async def test_generate_stream_sends_one_event_per_response() -> None:
    status, kind, text = await call("POST", STREAM, {**OK, "stream": True})
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(event.removeprefix("data: ")) for event in text.removesuffix("\n\n").split("\n\n")]
    assert events == [
        {**COMMON, "text_output": "a"},
        {**COMMON, "text_output": "b"},
        {**COMMON, "text_output": "c", "finish_reason": "stop"},
    ]
    _, _, text = await call("POST", STREAM, OK)
    assert json.loads(text.removeprefix("data: ")) == {**COMMON, "text_output": "hiabc", "finish_reason": "stop"}


@pytest.mark.parametrize(
    "body",
    [
        {**OK, "parameters": {"a": 1, "b": "s", "c": True}},
        {**OK, "foo": "bar"},
        {"parameters": {"max_tokens": 3}, "text_input": "hi"},
        {**OK, "text_input": ["hi"], "temperature": 1, "stop_words": "x", "bad_words": [""]},
    ],
)
async def test_forms_of_a_request_that_triton_accepts(body: dict[str, Any]) -> None:
    status, _, text = await call("POST", GENERATE, body)
    assert status == 200 and text.endswith('"text_output":"hiabc"}')


async def test_an_id_and_a_version_are_echoed() -> None:
    _, _, text = await call("POST", "/v2/models/tiny/versions/1/generate", {**OK, "id": "mine"})
    assert '"id":"mine","model_name":"tiny","model_version":"1",' in text


async def test_unicode_is_not_escaped() -> None:
    _, _, text = await call("POST", GENERATE, {"text_input": 'café "q" \n / 你 😀 \u0001 <&>', "max_tokens": 3})
    assert text.endswith('"text_output":"café \\"q\\" \\n / 你 😀 \\u0001 <&>abc"}')


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (GENERATE, {**OK, "foo": [1, 2]}, 400, "parameter 'foo' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("/v2/models/nope/generate", OK, 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/generate_stream", OK, 404, "Request for unknown model: 'nope' is not found"),
        (GENERATE, {**OK, "text_input": ["a", "b"]}, 400, "The schema can not convert input 'text_input' to tensor with proper shape"),
    ],
)
async def test_errors_have_triton_s_text(path: str, body: Any, status: int, error: str) -> None:
    assert await call("POST", path, body) == (status, "application/json", json.dumps({"error": error}, separators=(",", ":")))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_tokens", "three", "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("max_tokens", 2.5, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("max_tokens", 1 << 40, "Unable to parse 'data': a number does not fit INT32"),
        ("text_input", 5, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ("stream", 1, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        ("temperature", None, "Unable to parse 'data': attempt to access JSON non-number as double"),
    ],
)
async def test_wrong_types_are_named(name: str, value: Any, error: str) -> None:
    status, _, text = await call("POST", GENERATE, {**OK, name: value})
    assert (status, text) == (500, json.dumps({"error": error}, separators=(",", ":")))


@pytest.mark.parametrize("body", [b'{"text_input": ', b"", b"[1]", b'{"max_tokens": NaN}'])
async def test_malformed_bodies(body: bytes) -> None:
    for path in (GENERATE, STREAM):
        status, kind, text = await call("POST", path, body)
        assert (status, kind) == (500, "application/json") and text.startswith('{"error":"')


async def test_a_missing_input_is_counted_and_named() -> None:
    status, _, text = await call("POST", GENERATE, {"text_input": "x"})
    assert status == 400
    assert text.startswith('{"error":"[request id: <id_unknown>] expected number of inputs between 2 and ')
    assert "but got 1 inputs for model 'ensemble'. Got input(s) ['text_input'], but missing required input(s) ['max_tokens']." in text


async def test_paths_and_methods() -> None:
    assert (await call("GET", "/v2/zzz"))[::2] == (404, '{"error":"Not Found"}')
    assert (await call("GET", GENERATE))[::2] == (405, '{"error":"Method Not Allowed"}')
    assert (await call("POST", "/v2/health/live"))[::2] == (405, '{"error":"Method Not Allowed"}')


async def test_an_error_before_the_first_event_has_its_status() -> None:
    service = ScriptedService()
    service.error = QueueFullError(5, 5, 2.0)
    status, kind, text = await call("POST", STREAM, OK, service)
    assert (status, kind) == (429, "text/event-stream; charset=utf-8")
    assert text.startswith('data: {"error":"Exceeds maximum queue size. Maximum queue size of the model is reached: 5 requests are waiting')
    status, kind, text = await call("POST", GENERATE, OK, service)
    assert (status, kind) == (429, "application/json")


async def test_an_error_in_a_stream_is_the_last_event() -> None:
    service = ScriptedService("abc")
    service.fails_after = 2
    status, _, text = await call("POST", STREAM, {**OK, "stream": True}, service)
    *events, error, end = text.split("\n\n")
    assert status == 200 and len(events) == 2 and error == 'data: {"error":"the step failed."}' and end == ""
    assert (await call("POST", GENERATE, OK, service))[::2] == (400, '{"error":"the step failed."}')


async def test_tensors_become_sampling_parameters() -> None:
    service = ScriptedService("!")
    tensors = {
        "top_k": 4, "top_p": 0.5, "temperature": 0.7, "repetition_penalty": 1.1, "min_length": 2, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "random_seed": 1 << 63, "stop_words": ["x", ""], "bad_words": ["b"], "end_id": 9,
        "embedding_bias_words": ["a"], "embedding_bias_weights": [1.5], "return_log_probs": True, "length_penalty": 0.5,
    }  # fmt: skip
    await call("POST", GENERATE, {**OK, **tensors}, service)
    params = service.requests[0].params
    assert (params.top_k, params.top_p, params.min_tokens, params.length_penalty) == (4, 0.5, 2, 0.5)
    float_params = (params.temperature, params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert float_params == pytest.approx((0.7, 1.1, 0.1, 0.2))  # inputs are FP32
    assert (params.seed, params.stop) == (1 << 63, ("x",))
    assert params.bad_words == ((98,), (32, 98)) and params.stop_token_ids == (9,) and params.ignore_eos and params.logprobs == 0
    assert params.logit_bias == {97: 1.5}


@pytest.mark.parametrize(
    ("tensors", "temperature"),
    [({}, 0.0), ({"temperature": 0.7}, 0.0), ({"top_k": 3}, 1.0), ({"top_p": 0.0}, 0.0), ({"top_p": 0.9, "temperature": 0.7}, 0.7)],
)
async def test_decoding_is_greedy_unless_top_k_or_top_p_is_given(tensors: dict[str, Any], temperature: float) -> None:
    service = ScriptedService("!")
    await call("POST", GENERATE, {**OK, **tensors}, service)
    assert service.requests[0].params.temperature == pytest.approx(temperature)


async def test_exclude_input_in_output() -> None:
    assert (await call("POST", GENERATE, {**OK, "exclude_input_in_output": True}))[2].endswith('"text_output":"abc"}')


async def test_return_log_probs() -> None:
    _, _, text = await call("POST", GENERATE, {**OK, "return_log_probs": True})
    assert '"cum_log_probs":-0.25' in text and '"output_log_probs":[-0.25,-0.25,-0.25]' in text
    options = TritonOptions(models=default_models(), normalize_log_probs=False)
    _, _, text = await call("POST", STREAM, {**OK, "stream": True, "return_log_probs": True}, options=options)
    scores = [json.loads(event[6:])["cum_log_probs"] for event in text.split("\n\n")[:-1]]
    assert scores == [-0.25, -0.5, -0.75]


@pytest.mark.parametrize("name", ["lora_task_id", "return_context_logits", "decoder_text_input", "prompt_vocab_size"])
async def test_unsupported_inputs_are_refused_by_name(name: str) -> None:
    value: Any = {"return_context_logits": True, "decoder_text_input": "x"}.get(name, 2)
    status, _, text = await call("POST", GENERATE, {**OK, name: value})
    assert status == 400 and text.startswith('{"error":"' + name)
