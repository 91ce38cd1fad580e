"""KServe over gRPC: forwards calls of inference.GRPCInferenceService to the gRPC ports of replicas, as bytes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stoker.base.errors import ConfigError, StokerError, UnavailableError
from stoker.router.core.policy import Route
from stoker.router.core.prefix import NO_PREFIX, PromptPrefix, token_prefix
from stoker.router.core.replica import Replica
from stoker.router.core.router import Lease
from stoker.router.proxy import prompts
from stoker.router.proxy.application import RouterApplication
from stoker.router.proxy.grpc_requests import RepeatableRequests
from stoker.router.proxy.prefills import Prefill
from stoker.runtime.transfer.ticket import HEADER
from stoker.server.errors import describe
from stoker.server.protocols.kserve.errors import client_message, grpc_code
from stoker.server.protocols.kserve.grpc.authentication import KeyInterceptor
from stoker.server.protocols.kserve.grpc.server import MAX_MESSAGE, SERVICE, bind_grpc

TICKET = HEADER.decode()
MAX_REPEATED_BYTES = 4 << 20  # requests of one stream that are repeated on another replica
BROADCAST = (
    "RepositoryModelLoad", "RepositoryModelUnload", "LogSettings", "TraceSetting", "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
)  # fmt: skip
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no type hints
    """One handler for all methods of the service."""

    def __init__(self, application: RouterApplication) -> None:
        self._application = application
        self._router = application.router
        self._channels: dict[str, Any] = {}

    def service(self, handler_call_details: Any) -> Any:
        """gRPC's hook: the handler of a method."""
        service, _, name = handler_call_details.method.lstrip("/").partition("/")
        if service != SERVICE:
            return None
        if name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self.stream)

        async def forward(data: bytes, context: Any) -> Any:
            """Forward a call of this method."""
            return await self.unary(name, data, context)

        return grpc.unary_unary_rpc_method_handler(forward)

    async def close(self) -> None:
        """Close the connections to the replicas."""
        for channel in self._channels.values():
            await channel.close()

    async def unary(self, name: str, data: bytes, context: Any) -> Any:
        """Answer or forward a call with one request and one response."""
        try:
            if name == "ServerLive":
                return pb.ServerLiveResponse(live=True).SerializeToString()
            if name == "ServerReady":
                return pb.ServerReadyResponse(ready=bool(self._router.fleet.available)).SerializeToString()
            if name in BROADCAST:
                return await self._to_all(name, data, context)
            route = await self._route(name, data, context)
            return await self._forward(name, data, route, context)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        except StokerError as error:
            await context.abort(getattr(grpc.StatusCode, grpc_code(describe(error).status)), client_message(error))

    async def _forward(self, name: str, data: bytes, route: Route, context: Any) -> bytes:
        """Send a call to the chosen replica, and to others while replicas fail."""
        tried: list[Replica] = []
        num_attempts = 0
        while True:
            lease = await self._acquire(route, tried)
            tried.append(lease.replica)
            num_attempts += 1
            prefill = self._begin_prefill(route, lease, data, context)
            try:
                metadata = self._metadata(context, prefill)
                response: bytes = await self._call(lease.replica, name)(data, metadata=metadata, timeout=_timeout(context))
            except grpc.aio.AioRpcError as error:
                if not self._has_failed(lease, error) or num_attempts > self._router.settings.max_retries:
                    raise
            except BaseException:
                lease.cancel()
                raise
            else:
                lease.succeed()
                return response
            finally:
                if prefill is not None:
                    prefill.end()

    async def _to_all(self, name: str, data: bytes, context: Any) -> bytes:
        """Send a call to all available replicas. The first error is raised; otherwise the last response is returned."""
        fleet = self._router.fleet
        replicas = [replica for replica in fleet if fleet.available >> replica.slot & 1]
        if not replicas:
            raise UnavailableError("no replica is available.", cure="Retry later.")
        calls = [self._call(replica, name)(data, metadata=self._metadata(context), timeout=_timeout(context)) for replica in replicas]
        responses: list[bytes] = await asyncio.gather(*calls)
        return responses[-1]

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Forward a stream. Its first request chooses the replica of all; they are repeated if that fails before it has responded."""
        sent = RepeatableRequests(requests, MAX_REPEATED_BYTES)
        tried: list[Replica] = []
        try:
            if (first := await sent.first()) is None:
                return
            route = await self._route("ModelInfer", first, context)
            num_attempts = 0
            while True:
                lease = await self._acquire(route, tried)
                tried.append(lease.replica)
                num_attempts += 1
                started = False
                prefill = self._begin_prefill(route, lease, first, context)
                try:
                    metadata = self._metadata(context, prefill)
                    call = self._stream_call(lease.replica)(sent.again(), metadata=metadata, timeout=_timeout(context))
                    async for response in call:
                        if not started:
                            lease.start_decode()
                        started = True
                        await context.write(response)
                    lease.succeed()
                    return
                except grpc.aio.AioRpcError as error:
                    failed = self._has_failed(lease, error)
                    if started and failed:
                        text = "the replica failed in the middle of its responses. Send the request again."
                        await context.abort(grpc.StatusCode.UNAVAILABLE, text)
                    if not failed or num_attempts > self._router.settings.max_retries or not sent.is_complete:
                        await context.abort(error.code(), error.details())
                except BaseException:
                    lease.cancel()
                    raise
                finally:
                    if prefill is not None:
                        prefill.end()
        except StokerError as error:
            await context.abort(getattr(grpc.StatusCode, grpc_code(describe(error).status)), client_message(error))
        finally:
            sent.close()

    def _begin_prefill(self, route: Route, lease: Lease, data: bytes, context: Any) -> Prefill | None:
        """Let another replica compute the prompt of a request, if that is better. It gets a stream, and does not respond."""

        async def send(replica: Replica, ticket: str) -> str:
            """Send the request with a ticket."""

            async def requests() -> AsyncIterator[bytes]:
                """The only request of the stream."""
                yield data

            metadata = [*self._metadata(context), (TICKET, ticket)]
            try:
                async for _ in self._stream_call(replica)(requests(), metadata=metadata, timeout=_timeout(context)):
                    return "it has answered the request"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise ConnectionError(error.details()) from None
                return f"{error.code().name} {error.details()}"
            return ""

        return self._application.prefills.begin(route, lease, send, lambda replica: self._address(replica) is not None)

    async def _acquire(self, route: Route, tried: list[Replica]) -> Lease:
        """A lease of a replica with a gRPC port. Those without one are added to `tried`."""
        while True:
            lease = await self._router.acquire(route, tried)
            if self._address(lease.replica) is not None:
                return lease
            lease.cancel()
            tried.append(lease.replica)

    def _has_failed(self, lease: Lease, error: Any) -> bool:
        """End a lease after an error. Whether the replica is the reason, so that another one may succeed."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            lease.fail()
            self._application.checker.check_soon(lease.replica)
            return True
        lease.succeed()
        return False

    async def _route(self, name: str, data: bytes, context: Any) -> Route:
        """The route of a request: its model and prompt."""
        headers = {key.encode(): value.encode() for key, value in context.invocation_metadata() if isinstance(value, str)}
        settings, fleet = self._application.settings, self._router.fleet
        session = headers.get(settings.session_header.encode(), b"").decode()
        tenant = prompts.tenant_of(headers, settings.tenant_header)
        if name != "ModelInfer":
            return Route(session=session, tenant=tenant)
        try:
            request = pb.ModelInferRequest.FromString(data)
        except DecodeError:
            return Route(session=session, tenant=tenant)  # the replica refuses it
        model = request.model_name if request.model_name in fleet.models() else None
        return Route(model, await self._prefix(request), session, "", tenant)

    async def _prefix(self, request: Any) -> PromptPrefix:
        """The prefix of the prompt: the input input_ids, or the text of text_input."""
        for i, tensor in enumerate(request.inputs):
            raw = request.raw_input_contents[i] if i < len(request.raw_input_contents) else b""
            if tensor.name == "input_ids" and tensor.datatype == "INT32":
                ids = [*struct.unpack(f"<{len(raw) // 4}i", raw[: len(raw) // 4 * 4])] or list(tensor.contents.int_contents)
                if ids and (size := self._application.tokens_per_block()):
                    return token_prefix(ids, size)
            if tensor.name == "text_input" and tensor.datatype == "BYTES":
                text = (raw[4:] if raw else b"".join(tensor.contents.bytes_contents[:1])).decode("utf-8", "replace")
                body = {"text_input": text, "max_tokens": 1}
                return await self._application.prefix(
                    "POST", f"/v2/models/{request.model_name}/generate", [], msgspec.json.encode(body), body
                )
        return NO_PREFIX

    def _call(self, replica: Replica, name: str) -> Any:
        """The method of a replica, for calls with bytes."""
        return self._channel(replica).unary_unary(f"/{SERVICE}/{name}")

    def _stream_call(self, replica: Replica) -> Any:
        """ModelStreamInfer of a replica."""
        return self._channel(replica).stream_stream(f"/{SERVICE}/ModelStreamInfer")

    def _channel(self, replica: Replica) -> Any:
        """The connection to a replica's gRPC port."""
        address = self._address(replica)
        if address is None:
            raise UnavailableError(f"the replica {replica.name} has no gRPC port.", cure="Serve it with --grpc-port.")
        if address not in self._channels:
            if replica.name.startswith("https:"):
                self._channels[address] = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options=_OPTIONS)
            else:
                self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return self._channels[address]

    def _address(self, replica: Replica) -> str | None:
        """host:port of a replica's gRPC port; None if it has none."""
        report = self._application.checker.reports.get(replica.name)
        if report is None or report.grpc_port is None:
            return None
        host = urlsplit(replica.name).hostname or ""
        return f"[{host}]:{report.grpc_port}" if ":" in host else f"{host}:{report.grpc_port}"

    def _metadata(self, context: Any, prefill: Prefill | None = None) -> list[tuple[str, str]]:
        """The client's metadata, with the ticket of `prefill`. If the router has its own keys, with the key of the replicas."""
        settings = self._application.settings
        dropped = ("grpc-", ":", "user-agent", TICKET)
        metadata = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(dropped)]
        if prefill is not None:
            metadata.append((TICKET, prefill.ticket))
        if settings.api_keys and settings.replica_api_key:
            metadata = [pair for pair in metadata if pair[0] not in ("authorization", "x-api-key")]
            metadata.append(("authorization", f"Bearer {settings.replica_api_key}"))
        return metadata


def make_grpc_server(application: RouterApplication, address: str) -> tuple[Any, GrpcProxy]:
    """A grpc.aio server that is bound to `address` and not started, and its handler; `server.port` is its port. Raises ConfigError."""
    settings = application.settings
    options = [
        ("grpc.max_receive_message_length", min(settings.max_request_bytes, MAX_MESSAGE)),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 1),
        ("grpc.max_metadata_size", 64 << 10),
    ]
    server = grpc.aio.server(options=options, interceptors=[KeyInterceptor(application.keys)] if application.keys.required else ())
    proxy = GrpcProxy(application)
    server.add_generic_rpc_handlers((proxy,))
    try:
        server.port = bind_grpc(server, address, settings.tls_certificate, settings.tls_key)
    except RuntimeError as error:
        raise ConfigError(f"{address} cannot be used: {error}.", cure="Use another --grpc-port.") from None
    return server, proxy


def _timeout(context: Any) -> float | None:
    """The seconds that are left until the client's deadline, or None."""
    left: float | None = context.time_remaining()
    return left
