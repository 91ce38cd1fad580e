"""KServe over gRPC in the ingress: calls are forwarded to a replica of the engine that serves the named model.

They arrive at the ingress's own gRPC port, or from the gRPC proxies of Ray Serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stoker.base.errors import ConfigError
from stoker.ray.engine_route import EngineRoute
from stoker.ray.grpc_service import SERVICE, STREAM, Message
from stoker.router.proxy.grpc import GrpcProxy
from stoker.server.protocols.kserve.grpc.server import MAX_MESSAGE, bind_grpc


class GrpcCalls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no type hints
    """The calls of inference.GRPCInferenceService, with messages as bytes. Contexts are those of gRPC, or CallContext."""

    def __init__(self, routes: Sequence[EngineRoute]) -> None:
        self._routes = list(routes)
        self._proxies = [GrpcProxy(route.application) for route in routes]

    def service(self, handler_call_details: Any) -> Any:
        """gRPC's hook: the handler of a method."""
        service, _, name = handler_call_details.method.lstrip("/").partition("/")
        if service != SERVICE:
            return None
        if name == STREAM:
            return grpc.stream_stream_rpc_method_handler(self.stream)

        async def forward(request: bytes, context: Any) -> bytes:
            """Answer a call of this method."""
            return await self.unary(name, request, context)

        return grpc.unary_unary_rpc_method_handler(forward)

    async def close(self) -> None:
        """Close the connections to the replicas."""
        for proxy in self._proxies:
            await proxy.close()

    async def unary(self, name: str, request: bytes, context: Any) -> bytes:
        """Answer a call with one request and one response."""
        if name == "ServerReady":
            ready: bytes = pb.ServerReadyResponse(ready=all(route.is_available for route in self._routes)).SerializeToString()
            return ready
        if name == "RepositoryIndex" and len(self._routes) > 1:
            return await self._index(request, context)
        response: bytes = await self._proxy(_model_of(name, request)).unary(name, request, context)
        return response

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answer ModelStreamInfer. The first request selects the engine."""
        source = aiter(requests)
        try:
            first = await anext(source)
        except StopAsyncIteration:
            return

        async def all_requests() -> AsyncIterator[bytes]:
            """The requests from the first one on."""
            yield first
            async for request in source:
                yield request

        await self._proxy(_model_of("ModelInfer", first)).stream(all_requests(), context)

    async def _index(self, request: bytes, context: Any) -> bytes:
        """The models of all engines."""
        merged = pb.RepositoryIndexResponse()
        for route, proxy in zip(self._routes, self._proxies, strict=True):
            if not route.application.router.fleet.available:
                merged.models.add(name=route.engine.name, version="1", state="UNAVAILABLE", reason="no replica runs")
                continue
            data = await proxy.unary("RepositoryIndex", request, context)
            merged.models.extend(pb.RepositoryIndexResponse.FromString(data).models)
        serialized: bytes = merged.SerializeToString()
        return serialized

    def _proxy(self, model: str) -> GrpcProxy:
        """The proxy of the engine that serves a model; the first one if none does, which refuses the call."""
        chosen = next((i for i, route in enumerate(self._routes) if model and route.serves(model)), 0)
        return self._proxies[chosen]


async def open_grpc_port(calls: GrpcCalls, address: str, max_request_bytes: int) -> Any:
    """A started grpc.aio server that listens on `address`, beside those of other ingresses of this machine. Raises ConfigError."""
    options = [
        ("grpc.max_receive_message_length", min(max_request_bytes, MAX_MESSAGE)),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 1),
        ("grpc.max_metadata_size", 64 << 10),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((calls,))
    try:
        bind_grpc(server, address, None, None)
    except RuntimeError as error:
        raise ConfigError(f"{address} cannot be used: {error}.", cure="Use another --grpc-port.") from None
    await server.start()
    return server


async def stream_from_ray(calls: GrpcCalls, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Message]:
    """The responses of ModelStreamInfer for a call that Ray Serve passes on."""
    call = CallContext(context)
    task = asyncio.create_task(calls.stream(requests, call))
    task.add_done_callback(lambda _: call.responses.put_nowait(None))
    try:
        while (response := await call.responses.get()) is not None:
            yield Message(response)
        await task
    finally:
        task.cancel()


def _model_of(name: str, request: bytes) -> str:
    """The model that a call names; empty if it names none, or is malformed."""
    try:
        message = getattr(pb, f"{name}Request").FromString(request)
    except (AttributeError, DecodeError):
        return ""
    return getattr(message, "model_name", "") or getattr(message, "name", "")


class CallContext:
    """The part of a gRPC servicer's context that GrpcProxy uses, for a call that Ray Serve passes on."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.responses: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=0)

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        """The metadata of the client."""
        return [(key, value) for key, value in self._context.invocation_metadata() if key not in ("application", "request_id")]

    def time_remaining(self) -> float | None:
        """Ray Serve does not pass the deadline of the client on; it cancels the call."""
        return None

    async def write(self, response: bytes) -> None:
        """Send one response of a stream."""
        self.responses.put_nowait(response)

    async def abort(self, code: Any, details: str) -> None:
        """End the call with a status."""
        self._context.set_code(code)
        self._context.set_details(details)
        raise RuntimeError(details)
