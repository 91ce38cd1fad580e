"""The ingress deployment: receives HTTP and gRPC requests, and sends each to a replica of the engine that it names.

HTTP requests come from HAProxy or from Ray Serve's HTTP proxy. gRPC requests come from Ray Serve's gRPC proxies, or on a cluster that
`stoker serve --ray` starts on this machine, directly to a port of the ingress: Ray Serve's proxies pass each message through Ray, and with
HAProxy they and the ingress would listen on all addresses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from stoker.base import env, logging
from stoker.ray.engine_route import EngineRoute
from stoker.ray.grpc_service import UNARY, Message
from stoker.ray.http_dispatch import HttpDispatch
from stoker.ray.keys import Keys
from stoker.ray.settings import ApplicationSettings

if TYPE_CHECKING:
    from stoker.ray.grpc_calls import GrpcCalls

GRPC_DRAIN_S = 50.0  # for calls at the end, less than the graceful shutdown of the deployment


class _Asgi:
    """The ASGI application of an ingress."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI interface."""
        if scope["type"] == "lifespan":
            await self._ingress.live(receive, send)
        else:
            await self._ingress.answer(scope, receive, send)


class Ingress:
    """The class of the deployment. `handles` are those of the engines' deployments, in the order of the settings."""

    def __init__(self, settings: ApplicationSettings, keys: Keys, *handles: Any, grpc_address: str | None = None) -> None:
        """`grpc_address`: HOST:PORT of the ingress's own gRPC port."""
        env.set_keys(keys.variables)
        logging.configure("INFO")
        self._settings, self._handles = settings, handles
        self._grpc: GrpcCalls | None = None
        self._grpc_address, self._grpc_server = grpc_address, None

    def __serve_build_asgi_app__(self) -> Any:
        """Ray Serve's hook: the ASGI application, called in the event loop in which it runs."""
        return _Asgi(self)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer an HTTP request."""
        await self._dispatch(scope, receive, send)

    async def live(self, receive: Any, send: Any) -> None:
        """Open the routes at the start, and close them at the end."""
        await receive()
        try:
            self.routes = [
                EngineRoute(engine, self._settings.ingress, handle)
                for engine, handle in zip(self._settings.engines, self._handles, strict=True)
            ]
            self._dispatch = HttpDispatch(self.routes, self._settings.ingress.max_request_bytes)
            for route in self.routes:
                await route.open()
            if self._grpc_address is not None:
                from stoker.ray.grpc_calls import open_grpc_port  # needs the extra grpc

                max_bytes = self._settings.ingress.max_request_bytes
                self._grpc_server = await open_grpc_port(self.grpc_calls, self._grpc_address, max_bytes)
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": repr(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._grpc_server is not None:
            await self._grpc_server.stop(GRPC_DRAIN_S)
        if self._grpc is not None:
            await self._grpc.close()
        for route in self.routes:
            await route.close()
        await send({"type": "lifespan.shutdown.complete"})

    @property
    def grpc_calls(self) -> GrpcCalls:
        """The calls of KServe over gRPC."""
        if self._grpc is None:
            from stoker.ray.grpc_calls import GrpcCalls  # needs the extra grpc

            self._grpc = GrpcCalls(self.routes)
        return self._grpc


def _unary(name: str) -> Any:
    """A method that Ray Serve calls for the method `name` of the gRPC service."""

    async def call(self: Ingress, request: Any, grpc_context: Any) -> Any:
        """Answer a call with one request and one response."""
        from stoker.ray.grpc_calls import CallContext

        return Message(await self.grpc_calls.unary(name, request, CallContext(grpc_context)))

    call.__name__ = name
    return call


async def _stream(self: Ingress, request_stream: Any, grpc_context: Any) -> AsyncIterator[Any]:
    """Answer ModelStreamInfer."""
    from stoker.ray.grpc_calls import stream_from_ray

    async for response in stream_from_ray(self.grpc_calls, request_stream, grpc_context):
        yield response


for _name in UNARY:
    setattr(Ingress, _name, _unary(_name))
Ingress.ModelStreamInfer = _stream  # type: ignore[attr-defined]
