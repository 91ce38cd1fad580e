"""The endpoints of the Responses API: create a response, and retrieve, cancel and delete stored ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from stoker.base.errors import QueueFullError, RequestError
from stoker.base.logging import get_logger
from stoker.frontend.service import Service
from stoker.server.errors import StorageError, describe
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context, Endpoint
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.send_answer import encode_events, send_answer
from stoker.server.protocols.common.client_names import with_client_name
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.lists import list_page, read_query
from stoker.server.protocols.openai.responses.events import ResponseEvents
from stoker.server.protocols.openai.responses.fields import COUNT_TABLE, TABLE
from stoker.server.protocols.openai.responses.objects import response_object
from stoker.server.protocols.openai.responses.request import ResponseCall, read_response_call
from stoker.server.protocols.openai.responses.store import ResponseStore, StoredResponse, StoreThread, unix_time

log = get_logger(__name__)

MAX_BACKGROUND = 256  # responses in the background per frontend process
CANCEL_POLL_S = 0.5  # how often a response in the background checks whether another process has cancelled it

FindService = Callable[[dict[str, Any]], Service]


class Responses:
    """The endpoints below /v1/responses. `find_service` returns the service of the model that a request names."""

    def __init__(self, context: Context, find_service: FindService) -> None:
        self._context = context
        self._find_service = find_service
        self._store = StoreThread(context.state_directory, context.settings.max_stored_bytes)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of responses in the background, by id
        context.background.append(lambda: self._stop)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/responses", self.create),
            Endpoint("POST", "/v1/responses/input_tokens", self.count_tokens),
            Endpoint("GET", "/v1/responses/{response_id}", self.retrieve),
            Endpoint("DELETE", "/v1/responses/{response_id}", self.delete),
            Endpoint("POST", "/v1/responses/{response_id}/cancel", self.cancel),
            Endpoint("GET", "/v1/responses/{response_id}/input_items", self.list_input),
        ]

    async def create(self, http: RequestContext) -> None:
        """Check the request, generate, and respond: whole, streamed, or at once for a response in the background."""
        values = TABLE.check(await http.json())
        try:
            async with http.cancel_on_disconnect():
                await self._create(http, values)
        except RequestError as error:
            raise _client_error(error, values) from None

    async def count_tokens(self, http: RequestContext) -> None:
        """The number of tokens of the prompt of a request."""
        values = COUNT_TABLE.check(await http.json())
        try:
            call = await self._read_call(values)
        except RequestError as error:
            raise _client_error(error, values) from None
        await http.respond(200, wire.encode({"object": "response.input_tokens", "input_tokens": len(call.turn.request.prompt)}))

    async def retrieve(self, http: RequestContext) -> None:
        """GET /v1/responses/{response_id}: a stored response."""
        query = read_query(http)
        if query.get("stream") == "true":
            raise RequestError("stream", True, "a stored response is not streamed", cure="Retrieve it without stream.")
        await http.respond(200, wire.encode((await self._get(http)).body))

    async def delete(self, http: RequestContext) -> None:
        """DELETE /v1/responses/{response_id}. A response that runs in the background is cancelled."""
        response_id = http.path["response_id"]
        await self._store.call(ResponseStore.delete, response_id)
        self._end_background(response_id)
        await http.respond(200, wire.encode({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, http: RequestContext) -> None:
        """Cancel a response in the background. One that has ended already is returned as it is."""
        stored = await self._get(http)
        if not stored.body["background"]:
            cure = "Close the connection of the request instead."
            raise RequestError("response_id", stored.body["id"], "only a response with background=true can be cancelled", cure=cure)
        if await self._store.call(ResponseStore.finish, {**stored.body, "status": "cancelled"}):
            self._end_background(stored.body["id"])
        await http.respond(200, wire.encode((await self._get(http)).body))

    async def list_input(self, http: RequestContext) -> None:
        """The items of a response's input, and of the conversation before it: newest first, or in their order with order=asc."""
        stored = await self._get(http)
        query = read_query(http)
        await http.respond(200, wire.encode(list_page([*stored.context, *stored.input], query)))

    async def _create(self, http: RequestContext, values: dict[str, Any]) -> None:
        """Create a response: in the background, streamed or whole."""
        call = await self._read_call(values)
        if values.get("background"):
            await http.respond(200, wire.encode(await self._start_background(call)))
        elif values.get("stream"):
            await self._stream(http, call)
        else:
            await http.respond(200, wire.encode(await self._whole(call)))

    async def _read_call(self, values: dict[str, Any]) -> ResponseCall:
        """Check the request and tokenize its prompt. Raises RequestError, also for an unknown previous response."""
        return await read_response_call(values, self._find_service(values), self._context.settings, self._store)

    async def _get(self, http: RequestContext) -> StoredResponse:
        """The stored response of the path. Raises UnknownResponseError."""
        return await self._store.call(ResponseStore.get, http.path["response_id"])

    async def _whole(self, call: ResponseCall) -> dict[str, Any]:
        """Generate the answer. The response's object, which is stored if the request says so."""
        events, answer = ResponseEvents(call, unix_time()), Answer(call.turn)
        async with aclosing(answer.stream()) as batches:
            async for batch in batches:
                events.push(batch)
        events.finish(answer)
        await self._save(call, events.response)
        return events.response

    async def _stream(self, http: RequestContext, call: ResponseCall) -> None:
        """Generate the answer and send its events. An error after the first event becomes an event."""
        events, answer = ResponseEvents(call, unix_time()), Answer(call.turn)
        error = await send_answer(http, answer, lambda: encode_events(events.start()), lambda batch: encode_events(events.push(batch)))
        last = events.finish(answer) if error is None else events.fail(describe(error))
        try:
            await self._save(call, events.response)
        except StorageError as full:
            last = events.fail(describe(full))
        await http.send(encode_events(last))
        await http.close_stream()

    async def _save(self, call: ResponseCall, body: dict[str, Any]) -> None:
        """Store the response, unless the request has store: false."""
        if call.store:
            await self._store.call(ResponseStore.put, StoredResponse(body, call.input, call.context))

    async def _start_background(self, call: ResponseCall) -> dict[str, Any]:
        """Start a task that generates the answer. The object with the status queued. Raises QueueFullError."""
        if len(self._tasks) >= MAX_BACKGROUND:
            raise QueueFullError(len(self._tasks), MAX_BACKGROUND, 1.0)
        created = unix_time()
        queued = response_object(call, "queued", created)
        await self._save(call, queued)
        task = self._tasks[call.id] = asyncio.create_task(self._run_background(call, created))
        task.add_done_callback(lambda _: self._tasks.pop(call.id, None))
        return queued

    def _end_background(self, response_id: str) -> None:
        """Cancel the task of this response, if there is one in this process."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    def _stop(self) -> None:
        """Cancel all responses in the background. They are failed for clients of a later server."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _run_background(self, call: ResponseCall, created: int) -> None:
        """Generate, and store the result. Ends early once the response is cancelled or deleted, also by another process."""
        events, answer = ResponseEvents(call, created), Answer(call.turn)
        await self._store.call(ResponseStore.finish, events.response)
        checked = time.monotonic()
        try:
            async with aclosing(answer.stream()) as batches:
                async for batch in batches:
                    events.push(batch)
                    if time.monotonic() - checked > CANCEL_POLL_S:
                        if not await self._store.call(ResponseStore.is_unfinished, call.id):
                            return
                        checked = time.monotonic()
            events.finish(answer)
        except Exception as error:
            events.fail(describe(error))
        try:
            await self._store.call(ResponseStore.finish, events.response)
        except StorageError as full:  # the stored response stays in progress, and is failed after the end of this process
            log.error("the result of %s is lost: %s", call.id, full)


def _client_error(error: RequestError, values: dict[str, Any]) -> RequestError:
    """The error with the names of this API."""
    names = {
        "messages": "input",
        "prompt": "input",
        "prompt_ids": "input",
        "max_tokens": "max_output_tokens",
        "guide": "text" if "text" in values else "tools",
        "truncate_prompt_tokens": "truncation=auto",
    }
    return with_client_name(error, names, values)
