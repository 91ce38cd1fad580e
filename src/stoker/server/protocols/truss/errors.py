"""Errors in the Truss server's format: {"error": text}, with the headers that Baseten's gateway reads."""

from __future__ import annotations

import json

from stoker.base.errors import StokerError, UnavailableError
from stoker.server.errors import Failure, describe
from stoker.server.http.request_context import RequestContext

NOT_READY = "Model with name model is not ready."
MODEL_FAILED = "Internal Server Error (in model/chainlet)."
_SOURCE = (b"x-baseten-error-source", b"04")  # the model's own server
_MODEL, _CLIENT = b"600", b"700"
# FastAPI's text for requests that no handler receives.
_DETAILS = {"unknown_route": "Not Found", "method_not_allowed": "Method Not Allowed"}


def error_body(message: object) -> bytes:
    """An error body with this message."""
    return json.dumps({"error": message}, ensure_ascii=False, separators=(",", ":")).encode()


def failure_body(failure: Failure) -> bytes:
    """The body for a request that fails before its handler: unknown path or method, missing API key."""
    if failure.code in _DETAILS:
        return json.dumps({"detail": _DETAILS[failure.code]}, separators=(",", ":")).encode()
    return error_body(failure.message)


async def refuse(http: RequestContext, status: int, message: str, code: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Respond with an error. `code` is for Baseten's gateway; default: 700 (client) for a status below 500, else 600 (model)."""
    gateway_headers = (_SOURCE, (b"x-baseten-error-code", code or (_CLIENT if status < 500 else _MODEL)))
    await http.respond(status, error_body(message), headers=(*gateway_headers, *headers))


async def refuse_error(http: RequestContext, error: Exception) -> None:
    """Respond with the error of an exception that was raised before the first byte of the response."""
    failure = describe(error)
    message = failure.message if isinstance(error, StokerError) or failure.status < 500 else MODEL_FAILED
    await refuse(http, failure.status, NOT_READY if isinstance(error, UnavailableError) else message, headers=failure.headers)
