"""KServe v2 over gRPC: the service inference.GRPCInferenceService with Triton's extensions."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from stoker.base.errors import ConfigError, StokerError
from stoker.base.logging import get_logger
from stoker.server.errors import describe
from stoker.server.http.internal_request import drop
from stoker.server.http.json_body import INLINE_BYTES
from stoker.server.prompt_export import PromptTransfer, act_with, wait_for_prompt
from stoker.server.protocol import Context
from stoker.server.protocols.kserve import metadata as described
from stoker.server.protocols.kserve.core import Core, NotOneResponseError
from stoker.server.protocols.kserve.errors import TritonError, client_message
from stoker.server.protocols.kserve.grpc import messages as grpc_messages
from stoker.server.protocols.kserve.grpc.authentication import KeyInterceptor, abort, count_request
from stoker.server.protocols.kserve.grpc.calls import CallLog, response_metadata
from stoker.server.protocols.kserve.grpc.shared_memory import SharedMemoryMethods
from stoker.server.protocols.kserve.inference import Inference, Response, ServedModel
from stoker.server.tenants.accepted_keys import AcceptedKeys
from stoker.server.threads import compute

log = get_logger(__name__)

SERVICE = "inference.GRPCInferenceService"
MAX_STREAM_REQUESTS = 4096  # in flight on one stream; further requests wait
MAX_MESSAGE = (1 << 31) - 1  # protobuf's own limit
EMPTY_FINAL = "triton_enable_empty_final_response"

Handler = Callable[[Any, Any], Awaitable[Any]]


class KServeGRPC:
    """The methods of the service. If the server has API keys, calls need the metadata `authorization: Bearer KEY`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._calls = CallLog(core.context.telemetry())

    def handlers(self) -> Any:
        """The argument of grpc.aio.Server.add_generic_rpc_handlers."""
        unary: dict[str, tuple[Handler, Any, Any]] = {
            "ServerLive": (self.live, pb.ServerLiveRequest, pb.ServerLiveResponse),
            "ServerReady": (self.ready, pb.ServerReadyRequest, pb.ServerReadyResponse),
            "ModelReady": (self.model_ready, pb.ModelReadyRequest, pb.ModelReadyResponse),
            "ServerMetadata": (self.server, pb.ServerMetadataRequest, pb.ServerMetadataResponse),
            "ModelMetadata": (self.metadata, pb.ModelMetadataRequest, pb.ModelMetadataResponse),
            "ModelConfig": (self.config, pb.ModelConfigRequest, pb.ModelConfigResponse),
            "ModelStatistics": (self.statistics, pb.ModelStatisticsRequest, pb.ModelStatisticsResponse),
            "RepositoryIndex": (self.index, pb.RepositoryIndexRequest, pb.RepositoryIndexResponse),
            "RepositoryModelLoad": (self.load, pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse),
            "RepositoryModelUnload": (self.unload, pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse),
            "TraceSetting": (self.trace, pb.TraceSettingRequest, pb.TraceSettingResponse),
            "LogSettings": (self.logging, pb.LogSettingsRequest, pb.LogSettingsResponse),
            **SharedMemoryMethods(self._core.shared_memory).methods(),
        }
        table = {
            name: grpc.unary_unary_rpc_method_handler(
                self._call(name, handler, request_type), response_serializer=lambda response: response.SerializeToString()
            )
            for name, (handler, request_type, _) in unary.items()
        }
        # The handlers of these two return bytes.
        table["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._call("ModelInfer", self.infer, pb.ModelInferRequest))
        table["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self.stream_infer)
        return grpc.method_handlers_generic_handler(SERVICE, table)

    async def live(self, request: Any, context: Any) -> Any:
        """ServerLive: always true."""
        return pb.ServerLiveResponse(live=True)

    async def ready(self, request: Any, context: Any) -> Any:
        """ServerReady: whether all loaded models are ready."""
        return pb.ServerReadyResponse(ready=self._core.ready)

    async def model_ready(self, request: Any, context: Any) -> Any:
        """ModelReady. Raises UnknownModelError."""
        return pb.ModelReadyResponse(ready=self._find(request).state == "READY")

    async def server(self, request: Any, context: Any) -> Any:
        """ServerMetadata: name, version and extensions."""
        return pb.ServerMetadataResponse(**described.server(self._core.options.server_name))

    async def metadata(self, request: Any, context: Any) -> Any:
        """ModelMetadata: inputs and outputs of a model."""
        return json_format.ParseDict(described.metadata(self._find(request)), pb.ModelMetadataResponse())

    async def config(self, request: Any, context: Any) -> Any:
        """ModelConfig: the config of a model."""
        config = described.config(self._find(request).model)
        return json_format.ParseDict({"config": config}, pb.ModelConfigResponse(), ignore_unknown_fields=True)

    async def statistics(self, request: Any, context: Any) -> Any:
        """ModelStatistics: the counters of one model, or of all if the request names none. Raises TritonError for an unknown one."""
        try:
            models = [self._find(request)] if request.name else self._core.catalogue.all()
        except TritonError:
            raise TritonError(f"requested model '{request.name[:200]}' is not available") from None
        result = {"model_stats": [self._core.statistics(served) for served in models]}
        return json_format.ParseDict(result, pb.ModelStatisticsResponse(), ignore_unknown_fields=True)

    async def index(self, request: Any, context: Any) -> Any:
        """RepositoryIndex: the models and their states."""
        return json_format.ParseDict({"models": self._core.index(ready_only=request.ready)}, pb.RepositoryIndexResponse())

    async def load(self, request: Any, context: Any) -> Any:
        """RepositoryModelLoad: load a model, and wait until it is ready."""
        await self._core.set_loaded(request.model_name, grpc_messages.parameters(request.parameters), loaded=True)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: Any, context: Any) -> Any:
        """RepositoryModelUnload: unload a model."""
        await self._core.set_loaded(request.model_name, grpc_messages.parameters(request.parameters), loaded=False)
        return pb.RepositoryModelUnloadResponse()

    async def trace(self, request: Any, context: Any) -> Any:
        """TraceSetting: change the trace settings of the server or of a model, and return all of them."""
        requested = {name: list(request.settings[name].value) or None for name in request.settings}
        current = await self._core.trace_settings.change(requested, self._core.traced_model(request.model_name))
        values = {name: {"value": value if isinstance(value, list) else [value]} for name, value in current.items()}
        return json_format.ParseDict({"settings": values}, pb.TraceSettingResponse())

    async def logging(self, request: Any, context: Any) -> Any:
        """LogSettings: change settings of the log, and return all of them."""
        await self._core.logging.change(grpc_messages.parameters(request.settings))
        response = pb.LogSettingsResponse()
        for name, value in self._core.logging.values().items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response

    async def infer(self, request: Any, context: Any) -> bytes:
        """ModelInfer. Returns the bytes of ModelInferResponse."""
        count_request()
        if (transfer := self._calls.transfer(context)) is not None:
            act_with(transfer)
        served = self._ready(request)
        if served.model.decoupled and not served.unary:
            raise TritonError("ModelInfer RPC doesn't support models with decoupled transaction policy", 501)
        inference = await self._read(request, served)
        inference.single = True
        try:
            response = await self._core.single_response(served, inference)
        except NotOneResponseError:
            raise TritonError(
                f"model '{served.model.name}' has several responses to this request. Send it with ModelStreamInfer."
            ) from None
        return grpc_messages.Encoder(served, inference, self._core.shared_memory).whole(response)

    async def stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Run the requests of one stream concurrently. They are cancelled if the client ends the stream, or sends a malformed message.

        A ticket in the metadata belongs to the first request. A stream that exports its prompt ends without a response.
        """
        free_places, write_lock = asyncio.Semaphore(MAX_STREAM_REQUESTS), asyncio.Lock()

        async def write(message: bytes) -> None:  # gRPC allows one write at a time
            """Write one message. Messages of concurrent requests are written one after another."""
            async with write_lock:
                await context.write(message)

        try:
            transfer = self._calls.transfer(context)
            async with asyncio.TaskGroup() as group:
                async for data in requests:
                    request = await _parse(pb.ModelInferRequest, data)
                    if transfer is not None and transfer.is_export:
                        await self._export(request, transfer)
                        return
                    variables = contextvars.copy_context()
                    if transfer is not None:
                        variables.run(act_with, transfer)
                        transfer = None
                    await free_places.acquire()
                    task = group.create_task(self._respond(request, context, write), context=variables)
                    task.add_done_callback(lambda _: free_places.release())
        except* StokerError as errors:
            await abort(context, errors.exceptions[0], ())
        except* grpc.aio.BaseError:  # a write to a stream whose client has disconnected, or disconnects during the write
            pass

    async def _export(self, request: Any, transfer: PromptTransfer) -> None:
        """Compute the prompt of a request for another server. Raises the error of the request."""

        async def handle() -> None:
            """Run the request until its prompt is computed."""
            act_with(transfer)
            if (error := await self._run(request, drop)) is not None:
                raise error

        await wait_for_prompt(transfer, asyncio.ensure_future(handle()))

    async def _respond(self, request: Any, context: Any, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Run one request of a stream and write its responses, or its error as a message of the stream. Each has a line in the log."""
        record, status = self._calls.open("ModelStreamInfer", context, request.id), 499
        try:
            error = await self._run(request, write)
            status = 200
            if error is not None:
                failure = describe(error)
                status, record.error = failure.status, failure.code
                message = client_message(error) if isinstance(error, StokerError) else failure.message
                await write(grpc_messages.stream_error(message, request.id))
        finally:
            self._calls.close(record, status)

    async def _run(self, request: Any, write: Callable[[bytes], Awaitable[None]]) -> Exception | None:
        """Run one request of a stream, and write its responses. Returns its error."""
        try:
            count_request()
            served = self._ready(request)
            inference = await self._read(request, served)
            empty_final = inference.parameters.pop(EMPTY_FINAL, False) is True
            encoder, ended = grpc_messages.Encoder(served, inference, self._core.shared_memory), False
            async with aclosing(self._core.responses(served, inference)) as responses:
                async for batch in responses:
                    for response in batch:
                        ended = response.final
                        if response.has_outputs or not response.final or empty_final:
                            await write(encoder.streamed(response))
            if empty_final and not ended:
                await write(encoder.streamed(Response(final=True)))
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            return error
        return None

    def _call(self, name: str, handler: Handler, request_type: Any) -> Handler:
        """A handler of bytes, which ends a call with a gRPC status if they are malformed or `handler` raises an exception."""

        async def run_handler(data: bytes, context: Any) -> Any:
            """Parse the request and run the handler. An error ends the call with its gRPC status."""
            record, status = self._calls.open(name, context), 499
            try:
                request = await _parse(request_type, data)
                self._calls.identify(record, context, getattr(request, "id", ""))
                response = await handler(request, context)
                status = 200
                context.set_trailing_metadata(response_metadata(record))
                return response
            except Exception as error:
                failure = describe(error)
                status, record.error = failure.status, failure.code
                await abort(context, error, response_metadata(record))
            finally:
                self._calls.close(record, status)

        return run_handler

    async def _read(self, request: Any, served: ServedModel) -> Inference:
        """The checked request. Raises TritonError."""
        read = grpc_messages.read_infer_message
        return await compute(read, request, served, self._core.shared_memory, long=request.ByteSize() > INLINE_BYTES)

    def _find(self, request: Any) -> ServedModel:
        """The model that a request names. Raises UnknownModelError."""
        name: str | None = getattr(request, "name", None)
        return self._core.catalogue.find(name if name is not None else request.model_name, _version(request))

    def _ready(self, request: Any) -> ServedModel:
        """The model that a request names. Raises TritonError if it is unknown or not ready."""
        return self._core.catalogue.ready(request.model_name, request.model_version)


def _version(request: Any) -> str:
    """The model version that a request names, or an empty text. Two names of the field exist."""
    version: str = request.version if hasattr(request, "version") else request.model_version
    return version


async def _parse(message_type: Any, data: bytes) -> Any:
    """The protobuf message of these bytes. Raises TritonError if they are malformed."""
    return await compute(grpc_messages.parse, message_type, data, long=len(data) > INLINE_BYTES)


def make_grpc_server(context: Context, address: str, core: Core | None = None) -> Any:
    """A grpc.aio server that is bound to `address` (host:port) and not started; `server.port` is its port.

    Several processes may listen on the same port. Messages longer than max_request_bytes are refused before they are read. Raises
    ConfigError if the address cannot be used.
    """
    settings, keys = context.settings, AcceptedKeys.of(context)
    options = [
        ("grpc.max_receive_message_length", min(settings.max_request_bytes, MAX_MESSAGE)),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 1),
        ("grpc.max_metadata_size", 64 << 10),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    server = grpc.aio.server(options=options, interceptors=[KeyInterceptor(keys)] if keys.required else ())
    server.add_generic_rpc_handlers((KServeGRPC(Core.of(context, core)).handlers(),))
    try:
        server.port = bind_grpc(server, address, settings.tls_certificate, settings.tls_key)
    except RuntimeError as error:
        raise ConfigError(f"{address} cannot be used: {error}.", cure="Use another --grpc-port.") from None
    return server


def bind_grpc(server: Any, address: str, certificate: str | None, key: str | None) -> int:
    """Listen at `address`, with TLS if there are files of a certificate and a key. Returns the port. Raises RuntimeError."""
    if certificate is None or key is None:
        return int(server.add_insecure_port(address))
    pair = (Path(key).read_bytes(), Path(certificate).read_bytes())
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
