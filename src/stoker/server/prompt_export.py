"""Answers a request whose prompt is computed for another server: its protocol reads the request, but writes no answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.frontend.prompt_transfer import CURRENT, PromptTransfer
from stoker.runtime.transfer.ticket import HEADER, read_ticket, transfer_key
from stoker.server.http.internal_request import drop, receiver
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Endpoint


async def handle_with_ticket(endpoint: Endpoint, http: RequestContext, max_body_bytes: int) -> None:
    """Run the handler of an endpoint for a request with a ticket. Raises RequestError for an invalid ticket."""
    transfer = PromptTransfer(read_ticket(http.headers[HEADER], transfer_key()))
    CURRENT.set(transfer)  # for this task, which handles the request
    assert transfer.ticket is not None
    if transfer.ticket.purpose == "import":
        await endpoint.handler(http)
        return
    body = await http.body()
    scope = {"method": http.method, "headers": list(http.headers.items()), "query_string": http.query}
    inner = RequestContext(scope, receiver(body), drop, max_body_bytes=max_body_bytes)
    inner.path = http.path
    handling: asyncio.Task[Any] = asyncio.ensure_future(endpoint.handler(inner))
    try:
        async with http.cancel_on_disconnect():
            await asyncio.wait({handling, transfer.computed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        handling.cancel()
        await asyncio.wait({handling})
    if http.disconnected:
        return
    if transfer.computed.done():
        await http.respond(200, msgspec.json.encode({"prompt_tokens": transfer.computed.result()}))
        return
    handling.result()  # raises the error of the handler
    raise RequestError("x-stoker-transfer", "export", "the request has no prompt of one sequence that can be exported")
