"""Response writers: the container's own format, SageMaker's format, and JSON lines made from OpenAI's events."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import StokerError
from stoker.server.errors import GenerationError, describe
from stoker.server.http.request_context import JSON, RequestContext
from stoker.server.protocols.openai.chunks import DONE
from stoker.server.protocols.sagemaker import eventstream
from stoker.server.protocols.sagemaker.errors import inference_body, model_error_body

JSON_LINES = b"application/jsonlines"
SSE = b"text/event-stream"
HANDLER_FAILED = 424  # the DJL server's status for a failed model
FIXED_HEADERS = (
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)


class Reply:
    """Responses of the container (/invocations, /predictions)."""

    def __init__(self, http: RequestContext) -> None:
        self.http = http

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers of each response: the request id, and the fixed ones of the DJL server."""
        return ((b"requestid", self.http.request_id.encode()), *FIXED_HEADERS)

    async def whole(self, body: bytes, content_type: bytes = JSON) -> None:
        """Send a whole response."""
        await self.http.respond(200, body, content_type, self.headers)

    async def open(self, content_type: bytes) -> None:
        """Start a streamed response."""
        await self.http.open_stream(content_type, headers=self.headers)

    async def send(self, data: bytes) -> None:
        """Send a part of a streamed response."""
        await self.http.send(data)

    async def close(self) -> None:
        """End a streamed response."""
        await self.http.close_stream()

    async def refuse(self, error: BaseException) -> None:
        """Respond with an error before the first byte of the response."""
        failure = describe(error)
        status = HANDLER_FAILED if isinstance(error, GenerationError) else failure.status
        await self.http.respond(status, inference_body(status, failure.message), headers=(*self.headers, *failure.headers))

    async def fail(self, error: StokerError, content_type: bytes) -> None:
        """End a stream with a record that describes the error."""
        record = inference_body(HANDLER_FAILED, error.message)
        await self.send(b"data: " + record + b"\n\n" if content_type == SSE else record + b"\n")
        await self.close()


class PlatformReply(Reply):
    """Responses of /endpoints/NAME/invocations: errors have the format of SageMaker's ModelError."""

    async def refuse(self, error: BaseException) -> None:
        """Respond with status 424 and a ModelError that contains the status and the message of this error."""
        failure = describe(error)
        body = model_error_body(failure.status, failure.message)
        await self.http.respond(424, body, headers=((b"x-amzn-errortype", b"ModelError"), *failure.headers))


class PlatformStream(PlatformReply):
    """Responses of /endpoints/NAME/invocations-response-stream: event-stream frames, also for whole responses."""

    async def whole(self, body: bytes, content_type: bytes = JSON) -> None:
        """Send a whole response as a single frame."""
        await self.open(content_type)
        await self.send(body)
        await self.close()

    async def open(self, content_type: bytes) -> None:
        """Start a stream of frames. `content_type` is that of the data in them."""
        headers = ((b"x-amzn-sagemaker-content-type", content_type), *self.headers)
        await self.http.open_stream(eventstream.CONTENT_TYPE, headers=headers)

    async def send(self, data: bytes) -> None:
        """Send data in one frame."""
        await self.http.send(eventstream.part(data))

    async def fail(self, error: StokerError, content_type: bytes) -> None:
        """End the stream with a frame that contains a ModelStreamError."""
        await self.http.send(eventstream.exception("ModelStreamError", error.message, "StreamBroken"))
        await self.close()


class JsonLinesContext:
    """Takes the place of the RequestContext in OpenAI's code and converts its events to JSON lines.

    LMI's async handler does the same with the events of vLLM.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply.http, name)

    async def respond(self, status: int, body: bytes = b"", content_type: bytes = JSON) -> None:
        """Send a whole response as one line. The status is always 200."""
        await self._reply.whole(body + b"\n", content_type)

    async def open_stream(self, content_type: bytes = SSE) -> None:
        """Start a stream of JSON lines, whatever the content type."""
        await self._reply.open(JSON_LINES)

    async def send(self, chunk: bytes) -> None:
        """Send the events of a chunk as lines."""
        await self._reply.send(b"".join(_line(event) for event in chunk.split(b"\n\n") if event))

    async def close_stream(self) -> None:
        await self._reply.close()


def _line(event: bytes) -> bytes:
    """The data of an event as a line. The event [DONE] becomes an empty line."""
    return b"\n" if event == DONE.rstrip() else event.removeprefix(b"data: ") + b"\n"
