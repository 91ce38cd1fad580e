"""/invocations where it deviates from the real server, every parameter, invalid input, and the states of /ping."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_http import asgi_client
from lmi_recordings import FAILED, RecordedService
from scripted_service import ScriptedService

from stoker.base.errors import CheckpointError, UnavailableError
from stoker.base.fields.table import FieldRow
from stoker.base.fields.values import Flag
from stoker.deploy.lmi.load import load_lmi
from stoker.frontend.repository import ModelRepository
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.protocol import Context
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.parameters import TABLE
from stoker.server.settings import ServerSettings


async def post(body: Any, service: ScriptedService | None = None, path: str = "/invocations", **options: Any) -> httpx.Response:
    lmi = LMIOptions(**options)
    async with asgi_client(service or RecordedService(), protocols=("sagemaker",), options=lmi) as client:
        content = body if isinstance(body, (str, bytes)) else json.dumps(body)
        return await client.post(path, content=content)


async def sampling_params(**parameters: Any) -> Any:
    """The SamplingParams that the service receives for these parameters."""
    service = ScriptedService("abc", max_beam_width=4)
    answer = await post({"inputs": "hi", "parameters": parameters}, service)
    assert answer.status_code == 200, answer.text
    return service.requests[0].params


async def test_any_content_type_is_json() -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",)) as client:
        answer = await client.post("/invocations", content=b'{"inputs":"hi there"}', headers={"content-type": "text/plain"})
    assert answer.json() == {"generated_text": "Hello, wörld"}


async def test_3p_without_details() -> None:
    answer = await post({"inputs": "hi", "parameters": {"output_formatter": "3p"}})
    assert answer.json()["body"] == {
        "generation": "Hello, wörld",
        "prompt_token_count": 2,
        "generation_token_count": 4,
        "stop_reason": "eos_token",
    }


async def test_a_failure_has_an_error_status_and_does_not_affect_the_next_request() -> None:
    service = RecordedService()
    async with asgi_client(service, protocols=("sagemaker",)) as client:
        for text, stream in (("BOOM", False), ("BOOM", True), ("BOOM LATE", False)):
            failed = await client.post("/invocations", json={"inputs": text, "stream": stream})
            assert (failed.status_code, failed.json()) == (424, {"error": FAILED, "code": 424})
        good = await client.post("/invocations", json={"inputs": "hi there"})
    assert good.json() == {"generated_text": "Hello, wörld"}


@pytest.mark.parametrize("options", [{}, {"tgi_compat": True}, {"dialect": "async"}, {"dialect": "0.26"}], ids=str)
async def test_a_failure_in_mid_stream_is_a_last_record_of_the_stream(options: dict[str, Any]) -> None:
    answer = await post({"inputs": "BOOM LATE", "stream": True}, **options)
    prefix, suffix = ("data: ", "\n\n") if "tgi_compat" in options else ("", "\n")
    records = answer.text.removesuffix(suffix).split(suffix)
    assert all(record.startswith(prefix) for record in records)
    assert json.loads(records[-1].removeprefix(prefix)) == {"error": FAILED, "code": 424}
    assert len(records) == 3


async def test_a_request_that_the_service_refuses_gets_400_before_the_first_byte() -> None:
    long = {"inputs": "x" * 300}
    for body in (long, {**long, "stream": True}):
        answer = await post(body, ScriptedService("abc"))
        assert answer.status_code == 400
        assert answer.json()["code"] == 400
        assert "300" in answer.json()["error"] or "301" in answer.json()["error"]


async def test_chat_logprobs_of_a_stream_have_openai_s_shape() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    first = json.loads((await post(body)).content.splitlines()[0])["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["top_logprobs"][0]["token"], first["top_logprobs"][0]["logprob"]) == ("Hello", "Hello", -0.5)


@pytest.mark.parametrize("group", [1, 3, 1000])
async def test_tool_calls_and_reasoning_of_invocations(group: int) -> None:
    """The response has DJL's structure with OpenAI's members, and the joined stream equals the whole response."""
    text = '<think>hm</think>Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "logprobs": True, "top_logprobs": 1}
    settings = {"protocols": ("sagemaker",), "tool_parser": "hermes", "reasoning_parser": "qwen3"}
    async with asgi_client(ScriptedService(text, group=group, max_output_len=256), **settings) as client:
        whole = (await client.post("/invocations", json=body)).json()["choices"][0]
        lines = [
            json.loads(line)["choices"][0] for line in (await client.post("/invocations", json=body | {"stream": True})).text.splitlines()
        ]
    calls = whole["message"].pop("tool_calls")
    assert whole["message"] == {"role": "assistant", "content": "Let me look.", "reasoning_content": "hm"}
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"city": "Oslo"}'}]
    assert whole["finish_reason"] == lines[-1]["finish_reason"] == "tool_calls"
    deltas = [line["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    parts = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [part["index"] for part in parts] == [0] * len(parts) and parts[0]["function"]["name"] == "weather"
    assert "".join(part["function"]["arguments"] for part in parts) == calls[0]["function"]["arguments"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert sum(len(line["logprobs"]["content"]) for line in lines) == len(whole["logprobs"]["content"]) == len(text)


async def test_with_a_reasoning_parser_plain_answers_stay_plain() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with asgi_client(ScriptedService("Yes."), protocols=("sagemaker",), reasoning_parser="qwen3") as client:
        choice = (await client.post("/invocations", json=body)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": None}
    assert choice["finish_reason"] == "eos_token"


async def test_chat_without_messages_or_role_is_refused() -> None:
    for messages in ([], [{"content": "x"}]):
        answer = await post({"messages": messages})
        assert answer.status_code == 400
        assert "messages" in answer.json()["error"]


async def test_output_formatter_beside_inputs() -> None:
    streamed = await post({"inputs": "hi", "output_formatter": "sse"})
    assert streamed.headers["content-type"] == "text/event-stream"
    assert (await post({"inputs": "hi", "output_formatter": "zzz"})).status_code == 400


@pytest.mark.parametrize(
    "method, path, status", [("GET", "/invocations", 405), ("PUT", "/invocations", 405), ("POST", "/invocations/x", 404)]
)
async def test_only_post_runs_an_inference(method: str, path: str, status: int) -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",)) as client:
        assert (await client.request(method, path, content=b'{"inputs":"hi"}')).status_code == status


REFUSED = {
    '{"inputs":"a","parameters":{"output_formatter":"zzz"}}': "output_formatter='zzz'",
    '{"inputs":"a","parameters":{"max_new_token":3}}': "Did you mean max_new_tokens",
    '{"inputs":"a","parameters":{"max_new_tokens":0}}': "parameters.max_new_tokens=0",
    '{"inputs":"a","parameters":{"max_new_tokens":"3"}}': "parameters.max_new_tokens='3'",
    '{"inputs":"a","parameters":{"temperature":-1}}': "parameters.temperature=-1",
    '{"inputs":"a","parameters":{"details":1}}': "parameters.details=1",
    '{"inputs":"a","parameters":{"watermark":true}}': "not watermarked",
    '{"inputs":"a","parameters":{"typical_p":0.5}}': "typical sampling",
    '{"inputs":"a","parameters":{"n":2},"stream":true}': "only one answer can be streamed",
    '{"inputs":"a","parameters":{"n":3,"best_of":2}}': "at least n=3",
    '{"inputs":"a","adapters":"x"}': "no adapters",
    '{"inputs":"a","streem":true}': "streem",
    '{"inputs":"a","stream":"yes"}': "stream='yes'",
}


@pytest.mark.parametrize("body", REFUSED)
async def test_invalid_values_are_refused_with_the_name_of_the_field(body: str) -> None:
    answer = await post(body)
    assert answer.status_code == 400
    assert REFUSED[body] in answer.json()["error"]


@pytest.mark.parametrize(
    "body", [b"[" * 5000, b'{"inputs":NaN}', b'{"inputs":"\xff"}', b"", b"\x00", b'{"inputs":["a"]}', b'{"inputs":{}}']
)
async def test_hostile_bodies_get_424_and_a_reason(body: bytes) -> None:
    answer = await post(body)
    assert answer.status_code == 424
    assert answer.json()["error"].startswith("Input Parsing failed.")
    assert len(answer.content) < 1000


async def test_long_payloads_are_not_echoed() -> None:
    answer = await post({"x": "y" * 100_000})
    assert answer.status_code == 424
    assert len(answer.content) < 1000


async def test_paged_responses_are_refused() -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",)) as client:
        answer = await client.post("/invocations", json={"inputs": "a"}, headers={"x-synchronous": "false"})
    assert (answer.status_code, "x-synchronous" in answer.text) == (400, True)


REACHING = {  # parameter → (value, attribute of SamplingParams, its expected value)
    "max_new_tokens": (7, "max_tokens", 7), "min_length": (3, "min_tokens", 3), "min_new_tokens": (3, "min_tokens", 3),
    "temperature": (0.5, "temperature", 0.5), "top_k": (9, "top_k", 9), "top_p": (0.25, "top_p", 0.25), "min_p": (0.1, "min_p", 0.1),
    "do_sample": (True, "temperature", 0.8), "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (0.5, "presence_penalty", 0.5), "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "num_beams": (2, "beam_width", 2), "length_penalty": (2, "length_penalty", 2.0), "early_stopping": (True, "early_stopping", True),
    "seed": (5, "seed", 5), "stop": ("x", "stop", ("x",)), "stop_sequences": (["x", "y"], "stop", ("x", "y")),
    "stop_token_ids": ([1], "stop_token_ids", (1,)), "bad_sequences": (["z"], "bad_words", ((122,), (32, 122))),
    "ignore_eos_token": (True, "ignore_eos", True), "ignore_eos": (True, "ignore_eos", True),
    "skip_special_tokens": (False, "skip_special_tokens", False), "n": (2, "n", 2), "best_of": (2, "n", 2),
    "guided_regex": ("a+", "guide.text", "a+"), "guided_grammar": ("root ::= \"a\"", "guide.kind", "grammar"),
    "guided_choice": (["a", "b"], "guide.kind", "choice"), "guided_json": ({"type": "object"}, "guide.kind", "json_schema"),
}  # fmt: skip
ELSEWHERE = {  # tested by their effect on the response
    "add_special_tokens", "truncate", "return_full_text", "details", "decoder_input_details", "top_n_tokens", "output_formatter",
    "request_timeout",
}  # fmt: skip


def test_every_accepted_parameter_has_a_case() -> None:
    assert {row.name for row in TABLE if row.status == "accepted"} == REACHING.keys() | ELSEWHERE


@pytest.mark.parametrize("name", REACHING)
async def test_parameters_reach_the_service(name: str) -> None:
    value, field, expected = REACHING[name]
    found = await sampling_params(**{name: value})
    for part in field.split("."):
        found = getattr(found, part)
    assert found == expected


async def test_the_request_of_the_lmi_documentation() -> None:
    body = {"inputs": "tell me a story of the little red riding hood", "parameters": {"max_new_tokens": 128, "do_sample": True}}
    service = ScriptedService("Once.")
    answer = await post(body, service)
    assert answer.json() == {"generated_text": "Once."}
    params = service.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (128, 0.8, 5, 0.85)


async def test_defaults_and_do_sample() -> None:
    plain = await sampling_params()
    assert (plain.max_tokens, plain.temperature, plain.logprobs) == (30, 0.0, None)
    sampled = await sampling_params(do_sample=True, top_k=3)
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (0.8, 3, 0.85)
    inferred = await sampling_params(top_p=0.5)
    assert (inferred.temperature, inferred.top_k, inferred.top_p) == (1.0, 0, 0.5)
    greedy = await sampling_params(do_sample=False, temperature=0.7)
    assert greedy.temperature == 0.0


async def test_prompts_and_deadlines() -> None:
    service = ScriptedService("abc")
    await post({"inputs": "hello", "parameters": {"truncate": 2, "add_special_tokens": False, "request_timeout": 3}}, service)
    assert (service.requests[0].prompt, service.requests[0].timeout_s) == ([108, 111], 3.0)
    await post({"inputs": "hi"}, service)
    assert service.requests[1].prompt == [2, 104, 105]


@pytest.mark.parametrize("row", [row for row in TABLE if row.status == "no effect"], ids=lambda row: row.name)
async def test_parameters_without_effect_are_accepted(row: FieldRow) -> None:
    value = True if isinstance(row.type, Flag) else "x"
    assert (await sampling_params(**{row.name: value})) == (await sampling_params())


async def test_n_and_best_of() -> None:
    answer = (await post({"inputs": "hi", "parameters": {"n": 2, "best_of": 3}}, ScriptedService("abc", "de", "f"))).json()
    assert answer["generated_text"] == "abc"
    assert [other["generated_text"] for other in answer["details"]["best_of_sequences"]] == ["de"]


async def test_stream_joined_is_the_whole_answer() -> None:
    service = ScriptedService("Grüße 🎉 und 日本", group=3)
    whole = (await post({"inputs": "hi", "parameters": {"max_new_tokens": 100}}, service)).json()["generated_text"]
    lines = [
        json.loads(line)
        for line in (await post({"inputs": "hi", "stream": True, "parameters": {"max_new_tokens": 100}}, service)).text.splitlines()
    ]
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"] == whole == service.answers[0]
    assert [line["token"]["id"] for line in lines] == list(whole.encode())


async def test_dynamic_batch() -> None:
    options: dict[str, Any] = {"rolling_batch": False, "batch_size": 2}
    answer = await post({"inputs": ["a", "b"]}, ScriptedService("abc"), **options)
    assert answer.json() == [{"generated_text": "abc"}, {"generated_text": "abc"}]
    streamed = await post({"inputs": ["a", "b"], "stream": True}, ScriptedService("abc"), **options)
    records = [json.loads(line)["outputs"] for line in streamed.text.splitlines()]
    assert ["".join(column) for column in zip(*records, strict=True)] == ["abc", "abc"]
    assert (await post({"inputs": ["a", "b", "c"]}, **options)).status_code == 424


async def test_the_published_properties_of_the_async_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They disable the rolling batch. The handler still answers one object, and the list of dynamic batching is that of rolling_batch."""
    monkeypatch.setattr("stoker.deploy.lmi.load.visible_gpus", lambda environment: 0)
    properties = tmp_path / "serving.properties"
    disabled = "option.model_id=org/model\noption.rolling_batch=disable\n"
    handler = "option.async_mode=True\noption.entryPoint=djl_python.lmi_trtllm.trtllm_async_service\nmodel_loading_timeout=1800\n"
    for text, expected in ((disabled + handler, {"generated_text": "abc"}), (disabled, [{"generated_text": "abc"}])):
        properties.write_text(text)
        options = load_lmi(tmp_path, {}).server.options
        async with asgi_client(ScriptedService("abc"), protocols=("sagemaker",), options=options) as client:
            assert (await client.post("/invocations", json={"inputs": "a"})).json() == expected


async def test_ping_distinguishes_loading_from_failed() -> None:
    repository, gate = ModelRepository(), asyncio.Event()

    async def load() -> Any:
        await gate.wait()
        raise CheckpointError("the weights are cut short.")

    async def unload(service: Any) -> None: ...

    repository.register("llm", load, unload)
    app = make_app(Context(repository, ServerSettings(protocols=("sagemaker",)), FrontendMetrics()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://stoker") as client:
        assert ((await client.get("/ping")).status_code) == 503
        loading = asyncio.create_task(repository.load("llm"))
        await asyncio.sleep(0)
        answer = await client.get("/ping")
        assert (answer.status_code, answer.json()["llm"]["status"]) == (503, "Loading")
        refused = await client.post("/invocations", json={"inputs": "hi"})
        assert (refused.status_code, refused.json()["code"]) == (503, 503)
        gate.set()
        with pytest.raises(CheckpointError):
            await loading
        answer = await client.get("/ping")
        assert answer.status_code == 500
        assert answer.json()["llm"] == {"status": "Failed", "reason": "CheckpointError: the weights are cut short."}


async def test_a_full_queue_and_a_lost_executor() -> None:
    service = RecordedService()
    service.error = UnavailableError("the executor is gone.")
    answer = await post({"inputs": "hi"}, service)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    service.is_ready = False
    async with asgi_client(service, protocols=("sagemaker",)) as client:
        assert (await client.get("/ping")).status_code == 500


async def test_models() -> None:
    async with asgi_client(RecordedService(), protocols=("sagemaker",)) as client:
        listed = (await client.get("/models")).json()["models"]
        described = (await client.get("/models/llm")).json()[0]["models"][0]
        wrong = await client.delete("/models/llm")
    assert [(m["modelName"], m["status"]) for m in listed] == [("llm", "READY")]
    assert (described["status"], described["workerGroups"][0]["workers"][0]["status"]) == ("Healthy", "READY")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "MethodNotAllowedException")
