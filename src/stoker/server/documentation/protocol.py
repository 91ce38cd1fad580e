"""The routes that describe the server: /openapi.json, /docs and the page of links at /."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from stoker.server.documentation.document import openapi_document
from stoker.server.documentation.page import documentation_page, links_page
from stoker.server.errors import Failure
from stoker.server.http.request_context import HTML, RequestContext
from stoker.server.operation import OBJECT, STRING, Operation, record
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.tenants.accepted_keys import AcceptedKeys

# The pages run no scripts and load nothing.
_HEADERS = ((b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),)


class Documentation(Protocol):
    """Describes `protocols`, which are all protocols of the server. A server of chosen protocols has no page at /."""

    prefixes = ("/docs", "/openapi.json")
    operations = {
        ("GET", "/openapi.json"): Operation(summary="This document", response=OBJECT),
        ("GET", "/docs"): Operation(summary="All routes as a page", response=STRING, response_type="text/html"),
        ("GET", "/"): Operation(summary="A page of links", response=STRING, response_type="text/html"),
    }
    error_schema = record({"error": STRING}, "Error")

    def __init__(self, context: Context, protocols: Sequence[Protocol]) -> None:
        super().__init__(context)
        self._protocols = protocols

    def endpoints(self) -> list[Endpoint]:
        pages = [Endpoint("GET", "/openapi.json", self.openapi, open=True), Endpoint("GET", "/docs", self.docs, open=True)]
        return pages if self.context.settings.protocols else [*pages, Endpoint("GET", "/", self.links, open=True)]

    async def openapi(self, http: RequestContext) -> None:
        """GET /openapi.json: the OpenAPI document."""
        await http.respond(200, await asyncio.to_thread(lambda: msgspec.json.encode(self._document)))

    async def docs(self, http: RequestContext) -> None:
        """GET /docs: the routes with their fields, as a page."""
        await http.respond(200, await asyncio.to_thread(lambda: self._page), HTML, _HEADERS)

    async def links(self, http: RequestContext) -> None:
        """GET /: links to the routes that a browser can open."""
        await http.respond(200, await asyncio.to_thread(lambda: links_page(self._document["paths"])), HTML, _HEADERS)

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})

    @cached_property
    def _document(self) -> dict[str, Any]:
        """The OpenAPI document, built at its first use."""
        return openapi_document([*self._protocols, self], secured=AcceptedKeys.of(self.context).required)

    @cached_property
    def _page(self) -> bytes:
        """The page of /docs, built at its first use."""
        return documentation_page(self._document)
