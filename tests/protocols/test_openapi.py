"""/openapi.json describes every route: real exchanges are valid according to it, and it refuses what the server refuses."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import openapi_spec_validator
import pytest
from live_http import asgi_client
from scripted_service import ScriptedService, make_context

from stoker.base.fields.json_schema import table_schema, value_schema
from stoker.base.fields.values import Flag, Line, ListOf, MappingOf, Real, Text, Whole, exactly
from stoker.server.documentation.protocol import Documentation
from stoker.server.protocols.openai.fields import TABLES
from stoker.server.protocols.registry import PROTOCOLS

RECORDED = Path(__file__).parents[1] / "triton" / "recorded"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<think>hm</think>Wait.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
USER = [{"role": "user", "content": "hi"}]
TEXT = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["hi"]}
COUNT = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [3]}
CHAT = {"messages": USER, "tools": [TOOL], "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "prompt_logprobs": None}
# (method, path of the document, body). {response} is the id of a stored response.
EXCHANGES: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/health/ready", None),
    ("GET", "/health/live", None),
    ("GET", "/health/replica", None),
    ("GET", "/version", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/docs", None),
    ("GET", "/", None),
    ("GET", "/console", None),
    ("GET", "/console/{name}", None),
    ("GET", "/console/api/server", None),
    ("GET", "/console/api/live", None),
    ("GET", "/console/api/log", None),
    ("GET", "/load", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model}", None),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [104, 105]}),
    ("POST", "/v1/completions", {"prompt": "hi", "logprobs": 1, "prompt_logprobs": 1, "echo": True, "return_token_ids": True}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}),
    (
        "POST",
        "/v1/responses",
        {
            "input": USER,
            "stream": True,
            "tools": [{"type": "function", "name": "weather"}],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ),
    ("POST", "/v1/responses", {"input": "hi", "background": True}),
    ("POST", "/v1/responses/input_tokens", {"input": "hi", "instructions": "x"}),
    ("POST", "/v1/responses/{response_id}/cancel", {}),
    ("GET", "/v1/responses/{response_id}", None),
    ("GET", "/v1/responses/{response_id}/input_items", None),
    ("DELETE", "/v1/responses/{response_id}", None),
    ("GET", "/v1/files", None),
    ("GET", "/v1/files/{file_id}", None),
    ("GET", "/v1/files/{file_id}/content", None),
    ("POST", "/v1/batches", {"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("GET", "/v1/batches", None),
    ("GET", "/v1/batches/{batch_id}", None),
    ("DELETE", "/v1/files/{file_id}", None),
    ("POST", "/v1/messages", {"messages": USER, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}),
    (
        "POST",
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 200,
            "stream": True,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        },
    ),
    ("POST", "/v1/messages/count_tokens", {"messages": USER}),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/api/version", None),
    ("POST", "/api/show", {"model": "tiny"}),
    ("POST", "/api/chat", {"messages": USER, "tools": [TOOL], "options": {"seed": 1}, "think": True, "stream": False}),
    ("POST", "/api/chat", {"messages": USER, "tools": [TOOL], "format": "json", "logprobs": True, "top_logprobs": 1}),
    ("POST", "/api/chat", {"messages": []}),
    ("POST", "/api/generate", {"prompt": "hi", "stream": False, "keep_alive": "5m"}),
    ("POST", "/api/generate", {"prompt": "hi", "raw": True}),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/v2/models/stats", None),
    ("POST", "/v2/repository/index", {}),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/logging", {"log_verbose_level": 0}),
    ("GET", "/v2/trace/setting", None),
    ("POST", "/v2/trace/setting", {"trace_level": ["OFF"]}),
    ("GET", "/v2/models/{model}/trace/setting", None),
    ("POST", "/v2/models/{model}/trace/setting", {}),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("GET", "/v2/cudasharedmemory/status", None),
    ("POST", "/v2/systemsharedmemory/unregister", {}),
    ("POST", "/v2/cudasharedmemory/unregister", {}),
    *(
        (method, f"/v2/models/{{model}}{version}{path}", body)
        for version in ("", "/versions/{version}")
        for method, path, body in (
            ("GET", "", None),
            ("GET", "/ready", None),
            ("GET", "/config", None),
            ("GET", "/stats", None),
            ("POST", "/infer", {"id": "7", "inputs": [TEXT, COUNT]}),
            ("POST", "/generate", {"text_input": "hi", "max_tokens": 3}),
            ("POST", "/generate_stream", {"text_input": "hi", "max_tokens": 3, "stream": True}),
        )
    ),
    ("GET", "/ping", None),
    ("POST", "/ping", {}),
    ("GET", "/models", None),
    ("GET", "/models/{model}", None),
    ("POST", "/invocations", {"inputs": "hi", "parameters": {"max_new_tokens": 5, "details": True, "temperature": 0.5}}),
    ("POST", "/invocations", {"inputs": "hi", "stream": True}),
    ("POST", "/invocations", {"messages": USER}),
    ("POST", "/predictions/{model}", {"inputs": "hi"}),
    ("POST", "/predictions/{model}/{version}", {"inputs": "hi", "parameters": {"output_formatter": "3p"}}),
    ("POST", "/models/{model}/invoke", {"messages": USER, "stream": True}),
    ("POST", "/endpoints/{endpoint}/invocations", {"inputs": "hi"}),
    ("POST", "/endpoints/{endpoint}/invocations-response-stream", {"inputs": "hi"}),
    ("POST", "/v1/models/{model}:predict", {"prompt": "hi", "stream": False}),
    ("POST", "/v1/models/{model}:predict", {"prompt": "hi"}),
    ("POST", "/v1/models/{model}:predict_binary", {"prompt": "hi", "stream": False, "max_tokens": 5}),
]
BATCH = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hi"}}'
# Routes that have no success in this test, because they need a repository in explicit mode or shared memory, or do not exist for the model.
REFUSING = {
    ("POST", "/debug/profile"): None,
    ("GET", "/debug/state"): None,
    ("GET", "/console/api/engine"): None,
    ("POST", "/v1/batches/{batch_id}/cancel"): {},
    ("POST", "/v2/repository/models/{model}/load"): {},
    ("POST", "/v2/repository/models/{model}/unload"): {},
    ("POST", "/v2/systemsharedmemory/region/{region}/register"): {"key": "/k", "byte_size": 4},
    ("POST", "/v2/cudasharedmemory/region/{region}/register"): {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 4},
    ("GET", "/v2/systemsharedmemory/region/{region}/status"): None,
    ("GET", "/v2/cudasharedmemory/region/{region}/status"): None,
    ("POST", "/v2/systemsharedmemory/region/{region}/unregister"): {},
    ("POST", "/v2/cudasharedmemory/region/{region}/unregister"): {},
}
# Bodies that the server refuses, and that the document refuses, too.
WRONG: list[tuple[str, Any]] = [
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": "hi", "suffix": "x"}),
    ("/v1/completions", {"prompt": "hi", "temperature": "hot"}),
    ("/v1/completions", {"prompt": "hi", "max_token": 5}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "search"}]}),
    ("/v1/chat/completions", {"messages": USER, "n": 0}),
    ("/v1/responses", {"input": []}),
    ("/v1/responses", {"input": "hi", "conversation": "c"}),
    ("/v1/responses", {"input": "hi", "truncation": "some"}),
    ("/v1/messages", {"messages": USER}),
    ("/v1/messages", {"messages": USER, "max_tokens": 0}),
    ("/v1/messages", {"messages": [{"role": "robot", "content": "x"}], "max_tokens": 5}),
    ("/api/chat", {"messages": USER, "options": {"mirostat": 2}}),
    ("/api/generate", {"prompt": "hi", "suffix": "x"}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {}),
    ("/v2/models/{model}/infer", {"id": "7"}),
    ("/v2/logging", {"log_level": 1}),
    ("/v2/logging", {"log_verbose_level": 9}),
    ("/invocations", {"inputs": "hi", "parameters": {"watermark": True}}),
    ("/invocations", {"inputs": 5}),
]


@pytest.fixture
async def server() -> Any:
    service = ScriptedService(CALL, max_output_len=1024, group=5)
    async with asgi_client(service, tool_parser="hermes", reasoning_parser="qwen3", default_max_tokens=400) as http:
        yield http


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    async def fetch() -> dict[str, Any]:
        async with asgi_client(ScriptedService()) as http:
            return (await http.get("/openapi.json")).json()  # type: ignore[no-any-return]

    return asyncio.run(fetch())


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise ValidationError unless the value is valid for a schema of the document."""
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def request_schema(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    return document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]  # type: ignore[no-any-return]


def filled(path: str, **values: str) -> str:
    known = {"model": "tiny", "version": "1", "endpoint": "e", "region": "r", "response_id": "resp_1", "batch_id": "batch_1"}
    known |= {"name": "console.js", **values}
    return re.sub(r"\{(\w+)\}", lambda match: known[match[1]], path)


def parts(response: httpx.Response) -> list[Any]:
    """The JSON values of a response: one, or those of its events or lines."""
    kind = response.headers["content-type"].partition(";")[0]
    if kind == "text/event-stream":
        texts = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]
    if kind in ("application/jsonlines", "application/x-ndjson"):
        return [json.loads(line) for line in response.text.splitlines() if line]
    return [response.json()] if kind == "application/json" and response.content else [response.text]


def check_response(document: dict[str, Any], method: str, path: str, response: httpx.Response) -> None:
    operation = document["paths"][path][method.lower()]
    described = operation["responses"].get(str(response.status_code), operation["responses"]["default"]).get("content")
    if described is None:
        assert response.content == b""
        return
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in described, (kind, list(described))
    for part in parts(response):
        check(document, described[kind]["schema"], part)


def test_the_document_is_openapi(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)
    text = json.dumps(document)
    assert "Rejected: " in text and "http://" not in text.replace("http://stoker", "")


@pytest.mark.parametrize("protocols", [(), ("truss", "openai"), ("sagemaker",), ("kserve",)])
async def test_every_route_is_described(protocols: tuple[str, ...]) -> None:
    context = await make_context(ScriptedService(), protocols=protocols)
    served = [PROTOCOLS.get(name)(context) for name in dict.fromkeys(("health", "debug", *(protocols or tuple(PROTOCOLS))))]
    for protocol in (*served, Documentation(context, served)):
        routes = {(endpoint.method, endpoint.path) for endpoint in protocol.endpoints()}
        assert routes <= set(protocol.operations), type(protocol).__name__
        if not protocols and type(protocol).__name__ != "Truss":  # some routes exist only where the settings name the protocol
            assert routes == set(protocol.operations)


async def test_exchanges_are_valid(server: httpx.AsyncClient, document: dict[str, Any]) -> None:
    uploaded = await server.post("/v1/files", files={"file": ("a.jsonl", BATCH)}, data={"purpose": "batch"})
    check_response(document, "POST", "/v1/files", uploaded)
    seen, file_id, batch_id = {("POST", "/v1/files")}, uploaded.json()["id"], "batch_0"
    for method, path, body in EXCHANGES:
        seen.add((method, path))
        names = {"file_id": file_id, "batch_id": batch_id}
        body = {**body, "input_file_id": file_id} if path == "/v1/batches" and body else body
        if "{response_id}" in path:
            stored = await server.post("/v1/responses", json={"input": "hi", "background": "cancel" in path})
            names["response_id"] = stored.json()["id"]
        if body is not None and "requestBody" in document["paths"][path][method.lower()]:
            check(document, request_schema(document, method, path), body)
        response = await server.request(method, filled(path, **names), json=body)
        assert response.status_code == 200, (method, path, response.text)
        check_response(document, method, path, response)
        batch_id = response.json()["id"] if (method, path) == ("POST", "/v1/batches") else batch_id
    for (method, path), body in REFUSING.items():
        seen.add((method, path))
        if body:
            check(document, request_schema(document, method, path), body)
        response = await server.request(method, filled(path), json=body)
        check_response(document, method, path, response)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == seen


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_the_document_refuses_what_the_server_refuses(
    server: httpx.AsyncClient, document: dict[str, Any], path: str, body: Any
) -> None:
    response = await server.post(filled(path), json=body)
    assert response.status_code >= 400
    check_response(document, "POST", path, response)
    with pytest.raises(jsonschema.ValidationError):
        check(document, request_schema(document, "POST", path), body)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.txt")), ids=lambda path: path.stem)
def test_responses_recorded_from_triton_are_valid(document: dict[str, Any], path: Path) -> None:
    """An independent server: its JSON responses with status 200 are valid according to our description of the route."""
    request, _, response = path.read_bytes().partition(b"\n<<< RESPONSE")
    method, target = request.removeprefix(b">>> REQUEST\n").split(b" ")[:2]
    head, _, body = response.partition(b"\r\n\r\n")
    route = re.sub(r"^/v2/models/(?!stats)[^/]+", "/v2/models/{model}", target.decode())
    route = re.sub(r"/versions/[^/]+", "/versions/{version}", route)
    operation = document["paths"].get(route, {}).get(method.decode().lower())
    kind = b"application/json" if b"application/json" in head.lower() else b"text/event-stream"
    if b" 200 OK" not in head or kind not in head.lower() or operation is None:
        return
    values = [json.loads(match) for match in re.findall(rb"(?:^|\n|data: )([\[{][^\r\n]*[\]}])", body)]
    assert values or kind == b"text/event-stream"
    for value in values:
        check(document, operation["responses"]["200"]["content"][kind.decode()]["schema"], value)


@pytest.mark.parametrize(
    "kind",
    [
        Whole(1, 5),
        Real(0, 2),
        Real(0, 2, above=True),
        Flag(),
        Text(3),
        Line(),
        exactly("a", "b"),
        ListOf(Whole(0, 5), 2),
        ListOf(Text(3), 2, or_one=True),
        MappingOf(Text(8), Real(-1, 1)),
    ],
)
def test_schemas_accept_what_value_types_accept(kind: Any) -> None:
    probes = [None, True, False, 0, 1, 5, 6, -1, 0.5, 2.0, 2.5, "a", "abc", "abcd", [], [1], [1, 2, 3], ["a"], {}, {"a": 1}, {"a": "b"}]
    for probe in probes:
        try:
            kind.check(probe)
            accepted = True
        except ValueError:
            accepted = False
        assert jsonschema.Draft202012Validator(value_schema(kind)).is_valid(probe) == accepted, probe


def test_a_table_becomes_an_object_with_descriptions() -> None:
    schema = table_schema(TABLES["chat"], required=["messages"])
    assert schema["additionalProperties"] is False and schema["required"] == ["messages"]
    assert schema["properties"]["temperature"]["description"] == "Default 1; 0 is greedy decoding."
    assert schema["properties"]["store"]["enum"] == [False, None]
    assert set(schema["properties"]) == {row.name for row in TABLES["chat"]}


async def test_pages_work_without_a_network() -> None:
    async with asgi_client(ScriptedService(), console=False) as server:
        await check_pages(server)


async def check_pages(server: httpx.AsyncClient) -> None:
    page = (await server.get("/docs")).text
    assert "/v1/chat/completions" in page and "max_output_tokens" in page and "Answer a conversation" in page
    links = (await server.get("/")).text
    for text in (page, links):
        assert "<script" not in text and not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    for target in re.findall(r'href="(/[^"]*)"', links):
        assert (await server.get(target)).status_code == 200
    for anchor in set(re.findall(r'href="#([^"]+)"', page)):
        assert f'id="{anchor}"' in page


async def test_security_and_the_page_at_the_root() -> None:
    async with asgi_client(ScriptedService(), api_keys=("secret-key-1",)) as http:
        document = (await http.get("/openapi.json")).json()
        assert document["paths"]["/v1/models"]["get"]["security"] and document["paths"]["/health"]["get"]["security"] == []
    async with asgi_client(ScriptedService(), protocols=("kserve",)) as http:  # Triton has no page there
        assert (await http.get("/")).status_code == 404 and (await http.get("/docs")).status_code == 200
    async with asgi_client(ScriptedService(), protocols=("truss", "openai")) as http:
        assert msgspec.json.decode((await http.get("/")).content) is True
        assert (await http.get("/docs")).status_code == 404  # as in a Truss
