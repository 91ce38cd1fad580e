"""API keys of gRPC calls, in the metadata `authorization: Bearer KEY`, and the status with which a call ends."""

from __future__ import annotations

from typing import Any

import grpc

from stoker.base.errors import StokerError
from stoker.server.errors import RateLimitError, describe
from stoker.server.protocols.kserve.errors import client_message, grpc_code
from stoker.server.tenants.accepted_keys import AcceptedKeys
from stoker.server.tenants.tenants import Tenant, act_as, current_tenant

OPEN_METHODS = ("ServerLive", "ServerReady", "ModelReady")  # these need no API key
Metadata = tuple[tuple[str, str], ...]


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no type hints
    """Refuses calls without one of the server's API keys, except OPEN_METHODS, which are open over HTTP, too."""

    def __init__(self, keys: AcceptedKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """gRPC's hook for each call: its handler, or one that refuses the call."""
        handler = await continuation(details)
        method = details.method.rpartition("/")[2]
        if handler is None or method in OPEN_METHODS:
            return handler
        headers = {name.encode(): value.encode() for name, value in details.invocation_metadata if isinstance(value, str)}
        try:
            tenant = self._keys.authenticate(headers)
        except StokerError as error:
            return _refusing_handler(handler, error)
        return handler if tenant is None else _handler_for(handler, tenant)


def _handler_for(handler: Any, tenant: Tenant) -> Any:
    """The handler for a call of `tenant`."""
    if handler.response_streaming:

        async def run_stream(requests: Any, context: Any) -> None:
            """Run a stream."""
            act_as(tenant)
            await handler.stream_stream(requests, context)

        return grpc.stream_stream_rpc_method_handler(run_stream, handler.request_deserializer, handler.response_serializer)

    async def run_call(request: Any, context: Any) -> Any:
        """Run a call with one response."""
        act_as(tenant)
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(run_call, handler.request_deserializer, handler.response_serializer)


def _refusing_handler(handler: Any, error: StokerError) -> Any:
    """A handler of the same kind, streaming or not, that ends each call with the status of `error`."""

    async def refuse(request: Any, context: Any) -> Any:
        """End the call."""
        await abort(context, error)

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def count_request() -> None:
    """Count a request of the current tenant, if there is one: a call of ModelInfer, or a message on a stream. Raises RateLimitError."""
    if (tenant := current_tenant()) is not None:
        tenant.count_request()


async def abort(context: Any, error: Exception, metadata: Metadata = ()) -> None:
    """End a call with the status of `error`, and with `metadata` and the headers of HTTP that state when to retry.

    A limit of a key is RESOURCE_EXHAUSTED.
    """
    failure = describe(error)
    code = "RESOURCE_EXHAUSTED" if isinstance(error, RateLimitError) else grpc_code(failure.status)
    headers = list(failure.headers) if failure.status in (429, 503) else []
    if (tenant := current_tenant()) is not None:
        headers += tenant.headers()
    metadata += tuple((name.decode(), value.decode()) for name, value in headers)
    await context.abort(getattr(grpc.StatusCode, code), client_message(error), metadata)
