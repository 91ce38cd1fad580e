"""Failures as the Truss server spells them: {"error": text}, with the headers that Baseten's gateway reads."""

from __future__ import annotations

import json

from stoker.base.errors import StokerError, UnavailableError
from stoker.server.errors import Failure, describe
from stoker.server.http.request_context import RequestContext

NOT_READY = "Model with name model is not ready."
MODEL_FAILED = "Internal Server Error (in model/chainlet)."
_SOURCE = (b"x-baseten-error-source", b"04")  # the model's own server
_MODEL, _CLIENT = b"600", b"700"
# FastAPI's words for what no handler sees.
_DETAILS = {"unknown_route": "Not Found", "method_not_allowed": "Method Not Allowed"}


def error_body(message: object) -> bytes:
    return json.dumps({"error": message}, ensure_ascii=False, separators=(",", ":")).encode()


def failure_body(failure: Failure) -> bytes:
    """Of what fails before a handler: unknown paths and methods, a missing key."""
    if failure.code in _DETAILS:
        return json.dumps({"detail": _DETAILS[failure.code]}, separators=(",", ":")).encode()
    return error_body(failure.message)


async def refuse(http: RequestContext, status: int, message: str, code: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """`code` is the gateway's: by default 700 for the client's fault, 600 for the model's."""
    marks = (_SOURCE, (b"x-baseten-error-code", code or (_CLIENT if status < 500 else _MODEL)))
    await http.respond(status, error_body(message), headers=(*marks, *headers))


async def refuse_error(http: RequestContext, error: Exception) -> None:
    """What an exception becomes before the first byte of an answer."""
    failure = describe(error)
    message = failure.message if isinstance(error, StokerError) or failure.status < 500 else MODEL_FAILED
    await refuse(http, failure.status, NOT_READY if isinstance(error, UnavailableError) else message, headers=failure.headers)
