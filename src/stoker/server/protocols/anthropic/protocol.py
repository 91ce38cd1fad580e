"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.frontend.service import Service
from stoker.server.errors import Failure, describe
from stoker.server.http.request_context import REQUEST_ID, RequestContext
from stoker.server.protocol import Endpoint, Protocol
from stoker.server.protocols.anthropic.fields import COUNT_TABLE, TABLE
from stoker.server.protocols.anthropic.openapi import ERROR, OPERATIONS
from stoker.server.protocols.anthropic.request import MessageCall, read_message_call
from stoker.server.protocols.anthropic.response import MessageEvents, message_object
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.send_answer import encode_events, send_answer
from stoker.server.protocols.common.client_names import with_client_name, without_truncation

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Anthropic(Protocol):
    """Messages, whole and streamed, and the number of tokens of a prompt."""

    prefixes = ("/v1/messages",)
    operations = OPERATIONS
    error_schema = ERROR

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/messages", self.create),
            Endpoint("POST", "/v1/messages/count_tokens", self.count_tokens),
        ]

    async def create(self, http: RequestContext) -> None:
        """Check the request, generate, and respond, whole or streamed."""
        http.request_id_headers = (REQUEST_ID, b"request-id")
        values = TABLE.check(await http.json())
        service = self._service(values)
        try:
            async with http.cancel_on_disconnect():
                call = await read_message_call(values, service, self.context.settings)
                await (_stream(http, call) if call.stream else _whole(http, call))
        except RequestError as error:
            raise _client_error(error, values) from None

    async def count_tokens(self, http: RequestContext) -> None:
        """The number of tokens of the prompt of a request."""
        http.request_id_headers = (REQUEST_ID, b"request-id")
        values = COUNT_TABLE.check(await http.json())
        try:
            call = await read_message_call(values, self._service(values), self.context.settings, count_only=True)
        except RequestError as error:
            raise _client_error(error, values) from None
        await http.respond(200, msgspec.json.encode({"input_tokens": len(call.turn.request.prompt)}))

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode(failure_object(failure))

    def _service(self, values: dict[str, Any]) -> Service:
        """The service of the model that the request names. The default model if it names none.

        Raises NotFoundError for an unknown model.
        """
        name = values.get("model")
        return self.context.default_service() if name is None else self.context.repository.service(name)


def _client_error(error: RequestError, values: dict[str, Any]) -> RequestError:
    """The error with the names of this API."""
    constrained = next((name for name in ("output_config", "output_format") if name in values), "tools")
    names = {"prompt": "messages", "prompt_ids": "messages", "stop": "stop_sequences", "guide": constrained}
    return with_client_name(without_truncation(error), names, values)


def failure_object(failure: Failure) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ERROR_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


async def _whole(http: RequestContext, call: MessageCall) -> None:
    """Generate the answer, and respond with the whole message."""
    answer = Answer(call.turn)
    await answer.run()
    await http.respond(200, msgspec.json.encode(message_object(call, answer)))


async def _stream(http: RequestContext, call: MessageCall) -> None:
    """Generate the answer, and stream its events. An error after the first event becomes the last event."""
    answer = Answer(call.turn)
    events = MessageEvents(call, answer)
    error = await send_answer(http, answer, lambda: encode_events(events.start()), lambda batch: encode_events(events.push(batch)))
    await http.send(encode_events(events.finish() if error is None else [failure_object(describe(error))]))
    await http.close_stream()
