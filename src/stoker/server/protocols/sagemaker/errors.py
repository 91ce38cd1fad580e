"""Errors in the formats of the DJL server and of SageMaker."""

from __future__ import annotations

import json
from typing import Any

from stoker.base.errors import StokerError, start_of_repr
from stoker.server.errors import Failure

# Characters that Gson, the JSON library of the DJL server, always escapes in strings.
_GSON = str.maketrans({c: f"\\u{ord(c):04x}" for c in "'<>&=\u2028\u2029"})
_TYPES = {
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    503: "ServiceUnavailableException",
    429: "WlmCapacityException",
}
_MESSAGES = {
    "unknown_route": "Requested resource is not found, please refer to API document.",
    "method_not_allowed": "Requested method is not allowed, please refer to API document.",
}
_MAX_SHOWN_CHARS = 300


class PayloadError(StokerError):
    """A body does not have the format of /invocations. The DJL server responds with status 424."""

    status = 424
    code = "bad_payload"


class NoModelError(StokerError):
    """A path or query names a model that is not served."""

    status = 404
    code = "ModelNotFoundException"


def inference_body(status: int, message: str) -> bytes:
    """The error body of a failed inference: one line of JSON."""
    return json.dumps({"error": message, "code": status}, ensure_ascii=False, separators=(",", ":")).translate(_GSON).encode()


def management_body(failure: Failure) -> bytes:
    """The body for every other error: an indented JSON object."""
    kind = "ModelNotFoundException" if failure.code == "ModelNotFoundException" else _TYPES.get(failure.status)
    kind = kind or ("BadRequestException" if failure.status < 500 else "InternalServerException")
    message = _MESSAGES.get(failure.code, failure.message)
    return indented_json({"code": failure.status, "type": kind, "message": message})


def indented_json(value: Any) -> bytes:
    """JSON as the DJL server formats it."""
    return (json.dumps(value, ensure_ascii=False, indent=2).translate(_GSON) + "\n").encode()


def model_error_body(status: int, message: str) -> bytes:
    """The error body that SageMaker sends for an error of the container. boto3 raises it as ModelError."""
    kind, side = ("CLIENT_ERROR_FROM_MODEL", "client") if status < 500 else ("INTERNAL_FAILURE_FROM_MODEL", "server")
    text = f'Received {side} error ({status}) from primary with message "{message}"'
    fields = {"ErrorCode": kind, "Message": text, "OriginalMessage": message, "OriginalStatusCode": status}
    return json.dumps(fields, ensure_ascii=False).encode()


def shown(payload: Any) -> str:
    """A payload for an error message: its Python repr, truncated."""
    text = start_of_repr(payload, _MAX_SHOWN_CHARS + 1)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
