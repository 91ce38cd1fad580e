"""Request bodies of the Truss server: JSON with the rules of Python's json module, or msgpack. Error messages are the Truss server's."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stoker.server.errors import BodyError
from stoker.server.http.json_body import INLINE_BYTES, decode_json
from stoker.server.http.request_context import RequestContext

BINARY = b"application/octet-stream"
MAX_MEMBERS = 4096  # of a msgpack body above INLINE_BYTES


def is_binary(http: RequestContext) -> bool:
    """Whether the body is msgpack. The response then is, too. As in the Truss server, the path does not matter."""
    return http.content_type == BINARY.decode()


async def read_object(http: RequestContext) -> dict[str, Any]:
    """The body as a dict of JSON values. Raises BodyError."""
    data = await http.body()
    value = await http.compute(_decode_msgpack if is_binary(http) else _decode_json, data)
    if not isinstance(value, dict):
        raise BodyError(f"the body is a {type(value).__name__}, not an object.", cure='Send {"prompt": …}.')
    return value


def _decode_json(data: bytes) -> Any:
    """The value of a JSON body. Raises BodyError.

    Accepts NaN, Infinity and UTF-8, 16 or 32, as Python's json module does; above INLINE_BYTES, only standard JSON.
    """
    if len(data) > INLINE_BYTES:
        return decode_json(data)  # Python's module would hold the interpreter lock for seconds
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(data)  # accepts UTF-16, a byte order mark and NaN; the field table rejects NaN
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BodyError(f"Invalid JSON payload: {_reason(error)}") from None
    return value


def _reason(error: ValueError | RecursionError) -> str:
    """Why a body cannot be parsed."""
    match error:
        case UnicodeDecodeError():
            return f"byte {error.start} is not UTF-8"
        case UnicodeEncodeError():
            return "it contains half of a surrogate pair"
        case RecursionError():
            return "it is nested too deeply"
    return str(error)


def _decode_msgpack(data: bytes) -> Any:
    """The value of a msgpack body. Raises BodyError if it is damaged or has types that JSON lacks."""
    try:
        value = msgspec.msgpack.decode(data) if len(data) <= INLINE_BYTES else _decode_large_msgpack(data)
        if not _is_json(value):  # for example an array of numpy, as the truss client packs it
            raise BodyError("unsupported payload")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(_msgpack_message(str(error))) from None
    return value


def _decode_large_msgpack(data: bytes) -> dict[str, Any]:
    """The members of a map, decoded one by one. A member that is a list or a map has at most INLINE_BYTES. Raises BodyError."""
    members = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
    if len(members) > MAX_MEMBERS:
        raise BodyError(f"the payload has {len(members)} members, and the limit is {MAX_MEMBERS}.")
    for name, raw in members.items():
        if len(raw) > INLINE_BYTES and not _is_msgpack_string(raw):
            raise BodyError(f"{name[:80]} has {len(raw)} bytes, and the limit of a list or map is {INLINE_BYTES}.", cure="Send JSON.")
    return {name: msgspec.msgpack.decode(raw) for name, raw in members.items()}


def _is_msgpack_string(raw: msgspec.Raw) -> bool:
    """Whether a value longer than INLINE_BYTES is a string: str 32."""
    return bytes(memoryview(raw)[:1]) == b"\xdb"


def _is_json(value: Any) -> bool:
    """Whether JSON can represent the value: no bytes, no extension types, and only strings as keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))


def _msgpack_message(detail: str) -> str:
    """The error of Python's msgpack module for an error of msgspec."""
    if "truncated" in detail:
        return "Unpack failed: incomplete input"
    return "unpack(b) received extra data." if "trailing" in detail else f"Unpack failed: {detail}"
