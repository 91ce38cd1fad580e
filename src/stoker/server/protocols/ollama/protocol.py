"""The endpoints of Ollama's API."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.fields.table import FieldTable
from stoker.frontend.service import Service
from stoker.server.errors import BodyError, Failure
from stoker.server.http.json_body import decode_json
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.common.client_names import with_client_name, without_truncation
from stoker.server.protocols.ollama import fields, models
from stoker.server.protocols.ollama.openapi import ERROR, OPERATIONS
from stoker.server.protocols.ollama.request import read_chat_call, read_generate_call
from stoker.server.protocols.ollama.response import chat_members, generate_members, now_text, respond

API_VERSION = "0.12.6"  # the release of Ollama whose API this is; some clients refuse older ones
# Stoker's own names of fields: those of this API.
_NAMES = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty", "stop": "options.stop"}


class Ollama(Protocol):
    """Chat and generate, streamed by default, and descriptions of the served models."""

    prefixes = ("/api",)
    operations = OPERATIONS
    error_schema = ERROR

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._started = now_text()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/api/chat", self.chat),
            Endpoint("POST", "/api/generate", self.generate),
            Endpoint("GET", "/api/tags", self.tags),
            Endpoint("POST", "/api/show", self.show),
            Endpoint("GET", "/api/ps", self.running),
            Endpoint("GET", "/api/version", self.version, open=True),
        ]

    async def chat(self, http: RequestContext) -> None:
        """POST /api/chat."""
        values = await _read_values(http, fields.CHAT)
        service = self._service(values.get("model"))
        try:
            async with http.cancel_on_disconnect():
                await respond(http, await read_chat_call(values, service, self.context.settings), chat_members)
        except RequestError as error:
            names = {**_NAMES, "prompt": "messages", "prompt_ids": "messages", "guide": "format" if "format" in values else "tools"}
            raise with_client_name(without_truncation(error), names, values) from None

    async def generate(self, http: RequestContext) -> None:
        """POST /api/generate."""
        values = await _read_values(http, fields.GENERATE)
        service = self._service(values.get("model"))
        try:
            async with http.cancel_on_disconnect():
                await respond(http, await read_generate_call(values, service, self.context.settings), generate_members)
        except RequestError as error:
            names = {**_NAMES, "messages": "prompt", "prompt_ids": "prompt", "guide": "format"}
            raise with_client_name(without_truncation(error), names, values) from None

    async def tags(self, http: RequestContext) -> None:
        """GET /api/tags: the served models."""
        rows = [models.model_object(name, service, self._started) for name, service in self._services()]
        await http.respond(200, msgspec.json.encode({"models": rows}))

    async def running(self, http: RequestContext) -> None:
        """GET /api/ps: the served models, all of which are loaded."""
        rows = [models.running_object(name, service) for name, service in self._services()]
        await http.respond(200, msgspec.json.encode({"models": rows}))

    async def show(self, http: RequestContext) -> None:
        """POST /api/show: the details of a model."""
        values = await _read_values(http, fields.SHOW)
        service = self._service(values.get("model", values.get("name")))
        await http.respond(200, msgspec.json.encode(models.show_object(service, self.context.settings, self._started)))

    async def version(self, http: RequestContext) -> None:
        """GET /api/version: the version of Ollama whose API this is."""
        await http.respond(200, msgspec.json.encode({"version": API_VERSION}))

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})

    def _services(self) -> list[tuple[str, Service]]:
        """The ready models with their services."""
        return [(model.name, model.service) for model in self.context.repository.models() if model.service is not None]

    def _service(self, name: str | None) -> Service:
        """The service of a model. The tag :latest stands for no tag."""
        if name is None:
            return self.context.default_service()
        known = name.removesuffix(models.LATEST) if name not in self.context.repository else name
        return self.context.repository.service(known)


async def _read_values(http: RequestContext, table: FieldTable[Any]) -> dict[str, Any]:
    """The checked fields of a body. As in Ollama, the content type does not matter: curl's default is that of a form."""
    body = await http.compute(partial(decode_json, long_lists=False), await http.body())
    if not isinstance(body, dict):
        raise BodyError("the body is not a JSON object.", cure="Send {…}.")
    return table.check(body)
