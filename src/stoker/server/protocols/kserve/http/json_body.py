"""Reads JSON bodies, with the error messages and byte offsets of Triton's JSON reader (RapidJSON)."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stoker.server.http.json_body import INLINE_BYTES, decode_standard
from stoker.server.protocols.kserve.errors import TritonError

_MESSAGES = {  # message of Python's json module → message of RapidJSON
    "Expecting value": "Invalid value.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Expecting ',' delimiter": "Missing a comma or } after an object member.",
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Extra data": "The document root must not be followed by other values.",
}


def read_object(body: bytes | memoryview) -> dict[str, Any]:
    """The body as a JSON object. Raises TritonError with Triton's status 500, and BodyError for a large body with too many values."""
    try:
        value = decode_standard(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text, offset = _rapidjson_error(bytes(body), error) if len(body) <= INLINE_BYTES else (f"{error}", 0)
        raise TritonError(f"failed to parse the request JSON buffer: {text} at {offset}", 500) from None
    if not isinstance(value, dict):
        raise TritonError("attempt to get members for non-object", 500)
    return value


def _rapidjson_error(body: bytes, error: Exception) -> tuple[str, int]:
    """(message, byte offset) that Triton's JSON parser reports for this body. `error` is that of msgspec."""
    if not body.strip():
        return "The document is empty.", len(body)
    if isinstance(error, RecursionError):
        return "Terminate parsing due to Handler error.", len(body)
    try:
        json.loads(body)
    except json.JSONDecodeError as json_error:
        offset = len(json_error.doc[: json_error.pos].encode())
        return _MESSAGES.get(json_error.msg, "Invalid value."), offset
    except UnicodeDecodeError as encoding_error:
        return "Invalid encoding in string.", encoding_error.start
    except ValueError:  # an integer with more digits than Python accepts
        return "Number too big to be stored in double.", 0
    except RecursionError:
        return "Terminate parsing due to Handler error.", len(body)
    return "Invalid value.", 0  # for example NaN, which Python's json module accepts
