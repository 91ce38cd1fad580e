"""What must hold for every route of every protocol: limits of bodies and fields, API keys, and requests that web pages cause."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from scripted_service import ScriptedService, make_context

import stoker.server.protocols
from stoker.base.fields.table import FieldRow, FieldTable
from stoker.base.fields.values import Anything, ListOf, MappingOf, Text
from stoker.server.application import Application, make_app
from stoker.server.http.origin import WITHOUT_PREFLIGHT
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Endpoint
from stoker.server.protocols.kserve.tensors.fields import INPUTS

KEY = "secret-key-1"
MAX_BYTES = 8192
ALL_PROTOCOLS: tuple[str, ...] = ()
SERVERS = {"all": ALL_PROTOCOLS, "truss": ("truss",)}  # a Truss has routes of its own
NAMES = {"model": "tiny", "version": "1", "endpoint": "tiny", "name": "app.js"}
BODYLESS = {  # routes with a method that may have a body, which they do not read
    ("POST", "/debug/profile"),
    ("POST", "/ping"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/v1/embeddings"),
}
OPEN = {
    "/", "/console", "/console/{name}", "/docs", "/health", "/health/live", "/health/ready", "/openapi.json", "/ping", "/version",
    "/api/version", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}/ready", "/v2/models/{model}/versions/{version}/ready",
    "/v1/models/{model}", "/v1/models/{model}/loaded",
}  # fmt: skip
ADMIN = {"/debug/profile", "/debug/state"}  # the handlers require an admin key, which this server does not have
# Rows whose type accepts any value, and where the value is limited.
LIMITED_ELSEWHERE = {
    "prompt": "openai/prompts.py, truss/request.py and ollama/request.py: the length of a sequence",
    "messages": "frontend/chat_messages.py",
    "input": "openai/responses/input_items.py",
    "system": "anthropic/blocks.py",
    "tool_choice": "a name or an object of constant form",
    "response_format": "size of grammars: runtime/sampling",
    "format": "size of grammars: runtime/sampling",
    "guided_json": "size of grammars: runtime/sampling",
    "json_schema": "size of grammars: runtime/sampling",
    "input_schema": "rendered with limits of time, memory and characters: frontend/rendering; size of grammars",
    "parameters": "as input_schema",
    "name": "openai/chat/tool_choice.py and common/chat/tools.py: 256 characters",
    "think": "true, false or one of three words",
}


def path_of(endpoint: Endpoint) -> str:
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: NAMES.get(found[1], "x"), endpoint.path)


@contextlib.asynccontextmanager
async def served(server: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[Endpoint]]]:
    """(client, endpoints) of an application with a scripted model."""
    context = await make_context(ScriptedService(), protocols=SERVERS[server], **settings)
    app = make_app(context)
    inner = app if isinstance(app, Application) else app.app
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client, [endpoint for protocol in inner._protocols for endpoint in protocol.endpoints()]


def with_body(endpoints: list[Endpoint]) -> list[Endpoint]:
    return [each for each in endpoints if each.method not in ("GET", "HEAD", "DELETE") and (each.method, each.path) not in BODYLESS]


@pytest.mark.parametrize("server", SERVERS)
async def test_every_route_refuses_a_body_that_is_too_large(server: str) -> None:
    async with served(server, max_request_bytes=MAX_BYTES) as (client, endpoints):
        statuses = {}
        for endpoint in with_body(endpoints):
            for kind in ("application/json", "multipart/form-data; boundary=x"):
                body = b" " * (MAX_BYTES + 1)

                async def parts(body: bytes = body) -> AsyncIterator[bytes]:
                    yield body

                for content in (body, parts()):  # with and without Content-Length
                    answer = await client.post(path_of(endpoint), content=content, headers={"content-type": kind})
                    status = answer.status_code
                    if endpoint.path.startswith("/endpoints/"):  # SageMaker's runtime reports the status of the container in the body
                        status = answer.json()["OriginalStatusCode"] if status == 424 else status
                    statuses[endpoint.path, kind, type(content) is bytes] = (status, f"is {MAX_BYTES}" in answer.text)
    assert len(statuses) == 4 * len({each.path for each in with_body(endpoints)}) > 0
    assert {key: value for key, value in statuses.items() if value != (413, True)} == {}


@pytest.mark.parametrize("server", SERVERS)
async def test_routes_that_read_no_body_ignore_it(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list BODYLESS is complete and correct: exactly these routes never call `RequestContext.body`."""
    reading = False
    body = RequestContext.body

    async def recorded(http: RequestContext, *args: Any) -> bytes:
        nonlocal reading
        reading = True
        return await body(http, *args)

    monkeypatch.setattr(RequestContext, "body", recorded)
    async with served(server) as (client, endpoints):
        for endpoint in endpoints:
            reading = False
            await client.request(endpoint.method, path_of(endpoint), content=b"{}", headers={"content-type": "application/json"})
            assert reading == (endpoint in with_body(endpoints)), endpoint.path


@pytest.mark.parametrize("server", SERVERS)
async def test_only_listed_routes_need_no_key(server: str) -> None:
    async with served(server, api_keys=(KEY,)) as (client, endpoints):
        for endpoint in endpoints:
            answer = await client.request(endpoint.method, path_of(endpoint))
            is_open = endpoint.path in OPEN and not (server == "all" and endpoint.path == "/v1/models/{model}")
            if endpoint.path in ADMIN:
                assert answer.status_code == 403, endpoint.path
            else:
                assert (answer.status_code != 401) == is_open == endpoint.open, endpoint.path


@pytest.mark.parametrize("server", SERVERS)
async def test_pages_of_other_sites_cannot_post(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a preflight request, on any route, also those that do not read a body; and no preflight request is granted."""
    async with served(server) as (client, endpoints):
        posts = [endpoint for endpoint in endpoints if endpoint.method not in ("GET", "HEAD")]
        for endpoint in posts:
            for origin in ("https://evil.example", "null", "http://localhost:9999"):
                for kind in WITHOUT_PREFLIGHT:
                    headers = {"origin": origin, **({"content-type": kind} if kind else {})}
                    if endpoint.method == "POST":
                        answer = await client.post(path_of(endpoint), content=b"{}", headers=headers)
                        assert answer.status_code == 415, (endpoint.path, kind)
            preflight = {"access-control-request-method": endpoint.method, "access-control-request-headers": "content-type"}
            answer = await client.options(path_of(endpoint), headers={"origin": "https://evil.example", **preflight})
            assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers, endpoint.path
    assert len(posts) >= 4


BROWSERS = ({"origin": "http://evil.example:8000"}, {"sec-fetch-site": "same-origin"}, {"user-agent": "Mozilla/5.0 (X11)"})


@pytest.mark.parametrize("server", SERVERS)
async def test_a_name_of_another_site_cannot_refer_to_this_server(server: str) -> None:
    """DNS rebinding: the browser takes the server for the site evil.example, so that it sends any content type and reads the answer."""
    async with served(server) as (client, endpoints):
        for endpoint in endpoints:
            for headers in BROWSERS:
                sent = {"content-type": "application/json", "host": "evil.example:8000", **headers}
                answer = await client.request(endpoint.method, path_of(endpoint), content=b"{}", headers=sent)
                assert answer.status_code == 403 and "evil.example" in answer.text, (endpoint.path, headers)


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("localhost:8000", {}, 200),
        ("127.0.0.1", {}, 200),
        ("[::1]:8000", {}, 200),
        ("app.localhost", {}, 200),
        ("gpu-box:8000", {}, 200),
        ("evil.example", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("localhost.", {}, 200),
        ("", {}, 200),
        ("public.example", {"host": "0.0.0.0"}, 200),  # others reach it anyway
        ("public.example", {"api_keys": (KEY,)}, 401),
        ("public.example", {"cors_origins": ("https://public.example",)}, 200),
    ],
)
async def test_names_that_browsers_may_use(host: str, settings: dict[str, Any], status: int) -> None:
    async with served("all", **settings) as (client, _):
        headers = {"host": host, "user-agent": "Mozilla/5.0"}
        assert (await client.get("/v1/models", headers=headers)).status_code == status
        assert (await client.get("/v1/models", headers={**headers, "user-agent": "curl/8"})).status_code in (200, 401)


def tables() -> Iterator[tuple[str, FieldTable[Any]]]:
    """The field tables of requests of all protocols, with the name of their module."""
    for info in pkgutil.walk_packages(stoker.server.protocols.__path__, "stoker.server.protocols."):
        for value in vars(importlib.import_module(info.name)).values():
            for table in value.values() if isinstance(value, dict) else [value]:
                if isinstance(table, FieldTable) and table is not INPUTS:  # the types of tensors are those of the model's config
                    yield info.name.removeprefix("stoker.server.protocols."), table


def unbounded(row: FieldRow) -> bool:
    """Whether a value of any size passes the type of this row."""

    def accepts_any_size(kind: Any) -> bool:
        match kind:
            case Anything():
                return True
            case Text():
                return kind.max_chars > 1 << 24
            case ListOf():
                return kind.max_items > 1 << 24 or isinstance(kind.item, Anything)
            case MappingOf():
                return kind.max_items > 1 << 16
        return False

    return row.status == "accepted" and row.name not in LIMITED_ELSEWHERE and accepts_any_size(row.type)


def test_every_field_is_bounded() -> None:
    found = list(tables())
    assert len({module.partition(".")[0] for module, _ in found}) >= 5
    assert sorted({f"{module}: {row.name}" for module, table in found for row in table if unbounded(row)}) == []
