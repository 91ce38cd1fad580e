"""Sends each HTTP request to the router of the engine whose model it names, and answers lists of models for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from stoker.ray.engine_route import EngineRoute
from stoker.router.proxy.application import READY

# (method, path): member of the answer with the list of models.
LISTS = {("GET", "/v1/models"): "data", ("GET", "/api/tags"): "models", ("POST", "/v2/repository/index"): ""}


class HttpDispatch:
    """An ASGI application over the routers of the engines. Without a known model in the path or body, the first engine is used."""

    def __init__(self, routes: Sequence[EngineRoute], max_request_bytes: int) -> None:
        self._routes = list(routes)
        self._max_bytes = max_request_bytes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """The ASGI interface."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path in READY:
            return await _answer(send, 200 if all(route.is_available for route in self._routes) else 503)
        if scope["type"] != "http" or len(self._routes) == 1:
            return await self._routes[0].application(scope, receive, send)
        if (member := LISTS.get((scope["method"], path))) is not None:
            return await self._list(member, scope, receive, send)
        messages = [] if scope["method"] in ("GET", "HEAD") else await self._read(receive)
        name = _name_of(scope, messages)
        route = next((route for route in self._routes if name and route.serves(name)), self._routes[0])
        return await route.application(scope, _replay(messages, receive), send)

    async def _read(self, receive: Any) -> list[dict[str, Any]]:
        """The messages of the body, up to the size from which the router refuses it."""
        messages, size = [], 0
        while size <= self._max_bytes:
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body", False):
                break
        return messages

    async def _list(self, member: str, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer with the lists of all engines together. An engine without a replica is listed by its name."""
        messages = [] if scope["method"] == "GET" else await self._read(receive)
        whole: Any = None
        items: list[Any] = []
        for route in self._routes:
            if not route.application.router.fleet.available:
                name = route.engine.name
                items.append({"id": name, "name": name, "model": name, "object": "model", "owned_by": "stoker", "state": "UNAVAILABLE"})
                continue
            status, body = await _captured(route, scope, _replay(messages, receive))
            if status != 200:
                return await _answer(send, status, body)
            value = msgspec.json.decode(body)
            whole = whole or value
            items += value[member] if member else value
        answer = {**(whole or {"object": "list"}), member: items} if member else items
        return await _answer(send, 200, msgspec.json.encode(answer))


def _name_of(scope: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The model or engine that a request names: ?engine=NAME, /v2/models/NAME, or `model` of the body."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    parts = scope["path"].split("/")
    if engine := query.get("engine"):
        return str(engine[0])
    if scope["path"].startswith(("/v2/models/", "/v1/models/")) and parts[3]:
        return str(parts[3])
    try:
        value = msgspec.json.decode(b"".join(message.get("body", b"") for message in messages), type=_Named)
    except msgspec.MsgspecError:
        return ""
    return str(value.model) if isinstance(value.model, str) else ""


class _Named(msgspec.Struct):
    """The member of a body that selects the engine."""

    model: Any = None


def _replay(messages: list[dict[str, Any]], receive: Any) -> Any:
    """A `receive` that returns `messages` first."""
    waiting = list(reversed(messages))

    async def receive_again() -> Any:
        """The next message."""
        return waiting.pop() if waiting else await receive()

    return receive_again


async def _captured(route: EngineRoute, scope: dict[str, Any], receive: Any) -> tuple[int, bytes]:
    """The status and body of an engine's answer."""
    status, parts = 500, []

    async def send(message: dict[str, Any]) -> None:
        """Collect the parts of the answer."""
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await route.application(scope, receive, send)
    return status, b"".join(parts)


async def _answer(send: Any, status: int, body: bytes = b"") -> None:
    """Send a response."""
    kind = b"application/json" if body else b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
