"""The ingress deployment: receives HTTP and gRPC requests from Ray Serve, and sends each to a replica of the engine that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from stoker.base import env, logging
from stoker.ray.engine_route import EngineRoute
from stoker.ray.grpc_service import UNARY
from stoker.ray.http_dispatch import HttpDispatch
from stoker.ray.keys import Keys
from stoker.ray.settings import ApplicationSettings

if TYPE_CHECKING:
    from stoker.ray.grpc_calls import GrpcCalls


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

    def __init__(self, settings: ApplicationSettings, keys: Keys, *handles: Any) -> None:
        env.set_keys(keys.variables)
        logging.configure("INFO")
        self._settings, self._handles = settings, handles
        self._grpc: GrpcCalls | None = None

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
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": repr(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
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
        return await self.grpc_calls.unary(name, request, grpc_context)

    call.__name__ = name
    return call


async def _stream(self: Ingress, request_stream: Any, grpc_context: Any) -> AsyncIterator[Any]:
    """Answer ModelStreamInfer."""
    async for response in self.grpc_calls.stream(request_stream, grpc_context):
        yield response


for _name in UNARY:
    setattr(Ingress, _name, _unary(_name))
Ingress.ModelStreamInfer = _stream  # type: ignore[attr-defined]
