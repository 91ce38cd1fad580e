"""Errors of the router in the format of the API that a path belongs to, also inside a stream that has started."""

from __future__ import annotations

from stoker.base.errors import StokerError
from stoker.server.errors import describe
from stoker.server.protocol import Context, Protocol
from stoker.server.protocols.registry import PROTOCOLS
from stoker.server.protocols.sagemaker import eventstream
from stoker.server.protocols.sagemaker.errors import inference_body
from stoker.server.protocols.sagemaker.reply import HANDLER_FAILED

EVENTS, LINES = (b"text/event-stream",), (b"application/x-ndjson", b"application/jsonlines")
EVENT_FRAMES = eventstream.CONTENT_TYPE
CONTAINER_PATHS = ("/invocations", "/predictions")  # of SageMaker's containers


class Formats:
    """The protocols, used for the format of their errors only."""

    def __init__(self, context: Context) -> None:
        self._protocols: list[Protocol] = [PROTOCOLS.get(name)(context) for name in PROTOCOLS]

    def response(self, path: str, error: BaseException) -> tuple[int, bytes, bytes, tuple[tuple[bytes, bytes], ...]]:
        """(status, body, content type, headers) of the response to a request that failed."""
        failure = describe(error)
        protocol = self._owner(path)
        return failure.status, protocol.failure_body(failure), protocol.failure_type, failure.headers

    def in_stream(self, path: str, content_type: bytes, error: StokerError) -> bytes | None:
        """The error as the last part of a stream. None if the stream's format has no place for one; its connection is then closed early."""
        media_type = content_type.partition(b";")[0].strip().lower()
        if media_type == EVENT_FRAMES:
            return eventstream.exception("ModelStreamError", error.message, "StreamBroken")
        failure = describe(error)
        of_container = path.startswith(CONTAINER_PATHS)
        body = inference_body(HANDLER_FAILED, failure.message) if of_container else self._owner(path).failure_body(failure)
        if media_type in EVENTS:
            return (b"event: error\n" if path.startswith("/v1/messages") else b"") + b"data: " + body + b"\n\n"
        if media_type in LINES:
            return body + b"\n"
        return None

    def _owner(self, path: str) -> Protocol:
        """The protocol whose format the errors of a path have."""
        return next((protocol for protocol in self._protocols if path.startswith(protocol.prefixes)), self._protocols[0])


def whole_parts(content_type: bytes, data: bytes) -> int:
    """The length of the part of `data` that consists of whole events or lines, so that an error can follow it."""
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type in EVENTS:
        end = data.rfind(b"\n\n")
        return end + 2 if end >= 0 else 0
    if media_type in LINES:
        return data.rfind(b"\n") + 1
    return len(data)
