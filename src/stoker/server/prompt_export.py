"""Answers a request whose prompt is computed for another server: its protocol reads the request, but writes no answer.

Over gRPC, the ticket is in the metadata of the call. That of a stream belongs to its first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.frontend.prompt_transfer import CURRENT, PromptTransfer
from stoker.runtime.transfer.ticket import HEADER, read_ticket, transfer_key
from stoker.server.http.internal_request import drop, receiver
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Endpoint

__all__ = ["PromptTransfer", "act_with", "handle_with_ticket", "transfer_of", "wait_for_prompt"]


def transfer_of(headers: Mapping[bytes, bytes]) -> PromptTransfer | None:
    """The transfer whose ticket is in the headers of a request. Raises RequestError for an invalid ticket."""
    ticket = headers.get(HEADER)
    return PromptTransfer(read_ticket(ticket, transfer_key())) if ticket is not None else None


def act_with(transfer: PromptTransfer) -> None:
    """Use the ticket for the first token request of the present task."""
    CURRENT.set(transfer)


async def handle_with_ticket(endpoint: Endpoint, http: RequestContext, max_body_bytes: int) -> None:
    """Run the handler of an endpoint for a request with a ticket. Raises RequestError for an invalid ticket."""
    transfer = transfer_of(http.headers)
    assert transfer is not None
    act_with(transfer)
    if not transfer.is_export:
        await endpoint.handler(http)
        return
    body = await http.body()
    scope = {"method": http.method, "headers": list(http.headers.items()), "query_string": http.query}
    inner = RequestContext(scope, receiver(body), drop, max_body_bytes=max_body_bytes)
    inner.path = http.path
    handling: asyncio.Task[Any] = asyncio.ensure_future(endpoint.handler(inner))
    num_tokens = 0
    async with http.cancel_on_disconnect():
        num_tokens = await wait_for_prompt(transfer, handling)
    if not http.disconnected:
        await http.respond(200, msgspec.json.encode({"prompt_tokens": num_tokens}))


async def wait_for_prompt(transfer: PromptTransfer, handling: asyncio.Future[Any]) -> int:
    """Wait until the handler of an export has computed the prompt, and cancel it. Returns the number of tokens.

    Raises the error of the handler, and RequestError if it ends without a prompt.
    """
    try:
        await asyncio.wait({handling, transfer.computed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        handling.cancel()
        await asyncio.wait({handling})
    if transfer.computed.done():
        return transfer.computed.result()
    handling.result()  # raises the error of the handler
    raise RequestError("x-stoker-transfer", "export", "the request has no prompt of one sequence that can be exported")
