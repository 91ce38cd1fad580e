"""A complete protocol in one module: POST /echo/generate {"text", "max_tokens", "stream"} returns or streams the generated text."""

from __future__ import annotations

import uuid
from contextlib import aclosing

import msgspec

from stoker.base.errors import RequestError
from stoker.base.fields.json_schema import table_schema
from stoker.base.fields.table import FieldTable, accepted, rejected
from stoker.base.fields.values import Flag, Text, Whole
from stoker.base.types import FinishReason, GenerationRequest, SamplingParams
from stoker.frontend.prompts import encode_prompt
from stoker.frontend.service import Service
from stoker.server.errors import Failure, sequence_error
from stoker.server.http.request_context import PLAIN, RequestContext
from stoker.server.operation import STRING, Operation, record
from stoker.server.protocol import Endpoint, Protocol

FIELDS = FieldTable(
    (
        accepted("text", Text(1 << 20), "the prompt"),
        accepted("max_tokens", Whole(1, 1 << 20), "maximum number of new tokens; default 16"),
        accepted("stream", Flag(), "plain text as it is generated; default false"),
        rejected("temperature", "decoding is greedy", 0),
    )
)


class Echo(Protocol):
    """One endpoint with its own format of errors."""

    prefixes = ("/echo",)
    operations = {
        ("POST", "/echo/generate"): Operation(
            summary="Generate",
            body=table_schema(FIELDS, required=["text"]),
            response=record({"text": STRING}),
            stream=STRING,
            stream_type="text/plain",
        )
    }
    error_schema = record({"echo_error": STRING})

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("POST", "/echo/generate", self.generate)]

    async def generate(self, http: RequestContext) -> None:
        values = FIELDS.check(await http.json())
        if "text" not in values:
            raise RequestError("text", None, "it is missing")
        service = self.context.default_service()
        async with http.cancel_on_disconnect():
            ids = await encode_prompt(service, values["text"])
            params = SamplingParams(max_tokens=values.get("max_tokens", 16), temperature=0.0)
            request = GenerationRequest(request_id=uuid.uuid4().hex, prompt=ids, params=params)
            if values.get("stream"):
                await self._stream(http, service, request)
                return
            choice = (await service.complete(request)).choices[0]
            if choice.finish_reason is FinishReason.ERROR:
                raise sequence_error(choice.error, ready=service.ready)
            await http.respond(200, msgspec.json.encode({"text": choice.text}))

    async def _stream(self, http: RequestContext, service: Service, request: GenerationRequest) -> None:
        async with aclosing(service.stream(request)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    if delta.finish_reason is FinishReason.ERROR:  # after the start, it ends the connection
                        raise sequence_error(delta.error, ready=service.ready)
                if not http.started:
                    await http.open_stream(PLAIN)
                await http.send("".join(delta.text for delta in deltas).encode())
        await http.close_stream()

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"echo_error": failure.message})
