"""application/vnd.amazon.eventstream: the frames of invoke_endpoint_with_response_stream. All integers are big-endian.

frame:  total length u32 | headers length u32 | CRC-32 of both | headers | payload | CRC-32 of all preceding bytes
header: name length u8 | name | type u8 (7: text) | value length u16 | value
"""

from __future__ import annotations

import json
import struct
import zlib

CONTENT_TYPE = b"application/vnd.amazon.eventstream"
_TEXT = 7


def message(headers: dict[str, str], payload: bytes) -> bytes:
    """A frame with these headers, encoded."""
    return _framed(_headers(headers), payload)


def part(payload: bytes) -> bytes:
    """A PayloadPart event: the next bytes of the response body."""
    return _framed(_PART, payload)


def exception(kind: str, text: str, code: str | None = None) -> bytes:
    """An exception frame: ModelStreamError (with an ErrorCode) or InternalStreamFailure."""
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    fields = {"Message": text} | ({"ErrorCode": code} if code else {})
    return message(headers, json.dumps(fields, ensure_ascii=False).encode())


def _headers(headers: dict[str, str]) -> bytes:
    """The encoded headers of a frame. All values are strings."""
    packed = b""
    for name, value in headers.items():
        encoded = value.encode()
        packed += bytes([len(name)]) + name.encode() + bytes([_TEXT]) + struct.pack(">H", len(encoded)) + encoded
    return packed


def _framed(headers: bytes, payload: bytes) -> bytes:
    """A frame: sizes, their checksum, headers, payload, and the checksum of all."""
    prelude = struct.pack(">II", len(headers) + len(payload) + 16, len(headers))
    body = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return body + struct.pack(">I", zlib.crc32(body))


_PART = _headers({":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"})
