"""Failures as the DJL server and SageMaker spell them."""

from __future__ import annotations

import json
from typing import Any

from stoker.base.errors import StokerError
from stoker.server.errors import Failure

# Gson's habit: these never stand in its strings as they are.
_GSON = str.maketrans({c: f"\\u{ord(c):04x}" for c in "'<>&=\u2028\u2029"})
_TYPES = {
    404: "ResourceNotFoundException", 405: "MethodNotAllowedException", 503: "ServiceUnavailableException",
    429: "WlmCapacityException",
}  # fmt: skip
_MESSAGES = {
    "unknown_route": "Requested resource is not found, please refer to API document.",
    "method_not_allowed": "Requested method is not allowed, please refer to API document.",
}
_SHOWN = 300


class PayloadError(StokerError):
    """A body that is not what /invocations reads; 424 is what the DJL server answers."""

    status = 424
    code = "bad_payload"


class NoModelError(StokerError):
    """A path that names a model which is not there."""

    status = 404
    code = "ModelNotFoundException"


def inference_body(status: int, message: str) -> bytes:
    """The one line of a failed inference."""
    return json.dumps({"error": message, "code": status}, ensure_ascii=False, separators=(",", ":")).translate(_GSON).encode()


def management_body(failure: Failure) -> bytes:
    """The pretty object of every other failure."""
    kind = "ModelNotFoundException" if failure.code == "ModelNotFoundException" else _TYPES.get(failure.status)
    kind = kind or ("BadRequestException" if failure.status < 500 else "InternalServerException")
    message = _MESSAGES.get(failure.code, failure.message)
    return pretty({"code": failure.status, "type": kind, "message": message})


def pretty(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2).translate(_GSON) + "\n").encode()


def model_error_body(status: int, message: str) -> bytes:
    """What SageMaker itself makes of a container's error; boto3 raises ModelError from it."""
    kind, side = ("CLIENT_ERROR_FROM_MODEL", "client") if status < 500 else ("INTERNAL_FAILURE_FROM_MODEL", "server")
    told = f'Received {side} error ({status}) from primary with message "{message}"'
    fields = {"ErrorCode": kind, "Message": told, "OriginalMessage": message, "OriginalStatusCode": status}
    return json.dumps(fields, ensure_ascii=False).encode()


def shown(payload: Any) -> str:
    """A payload as an error shows it, as Python spells it, cut short."""
    text = repr(payload)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
