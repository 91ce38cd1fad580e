"""What Triton's JSON reader (RapidJSON) says of a damaged body, and at which byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stoker.server.protocols.kserve.errors import TritonError

_WORDS = {  # the standard library's complaint → RapidJSON's
    "Expecting value": "Invalid value.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Expecting ',' delimiter": "Missing a comma or } after an object member.",
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Extra data": "The document root must not be followed by other values.",
}


def read_object(body: bytes | memoryview) -> dict[str, Any]:
    """The body as a JSON object. Raises TritonError with Triton's status 500."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what, at = _rapidjson(bytes(body), error)
        raise TritonError(f"failed to parse the request JSON buffer: {what} at {at}", 500) from None
    if not isinstance(value, dict):
        raise TritonError("attempt to get members for non-object", 500)
    return value


def _rapidjson(body: bytes, error: Exception) -> tuple[str, int]:
    if not body.strip():
        return "The document is empty.", len(body)
    if isinstance(error, RecursionError):
        return "Terminate parsing due to Handler error.", len(body)
    try:
        json.loads(body)
    except json.JSONDecodeError as found:
        at = len(found.doc[: found.pos].encode())
        return _WORDS.get(found.msg, "Invalid value."), at
    except UnicodeDecodeError as found:
        return "Invalid encoding in string.", found.start
    except ValueError:  # a whole number of more digits than Python takes
        return "Number too big to be stored in double.", 0
    except RecursionError:
        return "Terminate parsing due to Handler error.", len(body)
    return "Invalid value.", 0  # NaN and the like, which the standard library takes
