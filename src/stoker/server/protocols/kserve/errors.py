"""Errors with Triton's text, and their status over HTTP and gRPC."""

from __future__ import annotations

from stoker.base.errors import QueueFullError, StokerError
from stoker.server.errors import describe


class TritonError(StokerError):
    """An error with the text of a Triton server, without a cure, because clients compare these messages. `status` is of HTTP."""

    code = "triton"

    def __init__(self, message: str, status: int = 400) -> None:
        self.status = status
        super().__init__(message)


class UnknownModelError(TritonError):
    """No model has this name or version."""

    code = "unknown_model"

    def __init__(self, name: str, version: str | None = None) -> None:
        numbered = f" version {version[:40]}" if version else ""
        super().__init__(f"Request for unknown model: '{name[:200]}'{numbered} is not found", 404)


# HTTP status → the gRPC status of the same error in Triton.
GRPC_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    413: "RESOURCE_EXHAUSTED",
    429: "UNAVAILABLE",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


def grpc_code(status: int) -> str:
    """The name of the gRPC status for an HTTP status. INTERNAL for one without a counterpart."""
    return GRPC_CODES.get(status, "INTERNAL")


def client_message(error: BaseException) -> str:
    """The message of `error` for a client. For a full queue it contains both texts that clients search for."""
    if isinstance(error, TritonError):
        return error.message
    message = describe(error).message
    if isinstance(error, QueueFullError):
        return f"Exceeds maximum queue size. Maximum queue size of the model is reached: {message}"
    return message
