"""KServe v2 over HTTP, with Triton's extensions: binary tensors, generate, statistics, repository, trace and log settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.server.errors import Failure, MethodError, RouteError, describe
from stoker.server.http.json_body import INLINE_BYTES
from stoker.server.http.request_context import EVENT_STREAM, JSON, PLAIN, RequestContext
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.kserve import metadata as described
from stoker.server.protocols.kserve.core import Core, NotOneResponseError
from stoker.server.protocols.kserve.errors import TritonError, UnknownModelError, client_message
from stoker.server.protocols.kserve.http import compression
from stoker.server.protocols.kserve.http import generate as generate_json
from stoker.server.protocols.kserve.http import infer as infer_json
from stoker.server.protocols.kserve.http.infer import InferCall
from stoker.server.protocols.kserve.http.json_body import read_object
from stoker.server.protocols.kserve.http.openapi import ERROR, MODEL, OPERATIONS, VERSIONED
from stoker.server.protocols.kserve.http.shared_memory import SharedMemoryEndpoints
from stoker.server.protocols.kserve.inference import Inference, Response, ServedModel
from stoker.server.protocols.kserve.tracing.settings import OF_SERVER
from stoker.server.threads import compute

OCTETS = b"application/octet-stream"

_encode = msgspec.json.encode


class KServeHTTP(Protocol):
    """The endpoints under /v2. Errors have Triton's text, status and content type."""

    prefixes = ("/v2",)
    operations = OPERATIONS
    error_schema = ERROR
    failure_type = PLAIN

    def __init__(self, context: Context, core: Core | None = None) -> None:
        super().__init__(context)
        self._core = Core.of(context, core)

    def endpoints(self) -> list[Endpoint]:
        # The router compares a path with one route after another, so the most frequent routes are first.
        endpoints = [
            Endpoint("POST", f"{base}/{name}", handler)
            for base in (MODEL, VERSIONED)
            for name, handler in (("generate_stream", self.generate_stream), ("generate", self.generate), ("infer", self.infer))
        ]
        endpoints += [
            Endpoint("GET", "/v2", self.server),
            Endpoint("GET", "/v2/health/live", self.live, open=True),
            Endpoint("GET", "/v2/health/ready", self.ready, open=True),
            Endpoint("GET", "/v2/models/stats", self.all_stats),
            Endpoint("POST", "/v2/repository/index", self.index),
            Endpoint("POST", "/v2/repository/models/{model}/load", self.load),
            Endpoint("POST", "/v2/repository/models/{model}/unload", self.unload),
            Endpoint("GET", "/v2/logging", self.logging),
            Endpoint("POST", "/v2/logging", self.set_logging),
        ]
        for base in (MODEL, VERSIONED):
            endpoints += [
                Endpoint("GET", base, self.metadata),
                Endpoint("GET", f"{base}/ready", self.model_ready, open=True),
                Endpoint("GET", f"{base}/config", self.config),
                Endpoint("GET", f"{base}/stats", self.stats),
            ]
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting"):
            endpoints += [Endpoint("GET", path, self.trace), Endpoint("POST", path, self.set_trace)]
        return endpoints + SharedMemoryEndpoints(self._core.shared_memory, self._refuse).endpoints()

    async def server(self, http: RequestContext) -> None:
        """GET /v2: name, version and extensions."""
        await http.respond(200, _encode(described.server(self._core.options.server_name)))

    async def live(self, http: RequestContext) -> None:
        """GET /v2/health/live: status 200."""
        await http.respond(200, content_type=PLAIN)

    async def ready(self, http: RequestContext) -> None:
        """GET /v2/health/ready: status 200 if all loaded models are ready, otherwise 503."""
        await http.respond(200 if self._core.ready else 503, content_type=PLAIN)

    async def model_ready(self, http: RequestContext) -> None:
        """GET …/ready of a model: status 200 if it is ready, otherwise 400."""
        try:
            ready = self._find(http).state == "READY"
        except UnknownModelError:
            ready = False
        if ready:
            await http.respond(200, content_type=PLAIN)
        else:
            await http.respond(400, _encode({"error": "Model version not ready"}), PLAIN)

    async def metadata(self, http: RequestContext) -> None:
        """GET a model: its inputs and outputs."""
        await self._respond_json(http, lambda: described.metadata(self._find(http)))

    async def config(self, http: RequestContext) -> None:
        """GET …/config of a model."""
        await self._respond_json(http, lambda: described.config(self._find(http).model))

    async def stats(self, http: RequestContext) -> None:
        """GET …/stats of a model: its counters."""
        try:
            served = self._find(http)
        except UnknownModelError:
            error = {"error": f"requested model '{http.path['model'][:200]}' is not available"}
            await http.respond(400, _encode(error))
        else:
            await http.respond(200, _encode({"model_stats": [self._core.statistics(served)]}))

    async def all_stats(self, http: RequestContext) -> None:
        """GET /v2/models/stats: the counters of all models."""
        await http.respond(200, _encode({"model_stats": [self._core.statistics(served) for served in self._core.catalogue.all()]}))

    async def index(self, http: RequestContext) -> None:
        """POST /v2/repository/index: the models and their states. With "ready": true, only the ready ones."""
        body = await http.body(INLINE_BYTES)
        ready_only = bool(body) and read_object(body).get("ready") is True
        await self._respond_json(http, lambda: self._core.index(ready_only=ready_only))

    async def load(self, http: RequestContext) -> None:
        """POST /v2/repository/models/{model}/load."""
        await self._set_loaded(http, loaded=True)

    async def unload(self, http: RequestContext) -> None:
        """POST /v2/repository/models/{model}/unload."""
        await self._set_loaded(http, loaded=False)

    async def _set_loaded(self, http: RequestContext, *, loaded: bool) -> None:
        """Load or unload the model of the path with the parameters of the body, and respond when this has ended."""
        body = await http.body(INLINE_BYTES)
        try:
            parameters = infer_json.parameters(read_object(body)) if body else {}
            await self._core.set_loaded(http.path["model"], parameters, loaded=loaded)
        except TritonError as error:
            await self._refuse(http, error, JSON)
        else:
            await http.respond(200)

    async def logging(self, http: RequestContext) -> None:
        """GET /v2/logging: the settings of the log."""
        await http.respond(200, _encode(self._core.logging.values()))

    async def set_logging(self, http: RequestContext) -> None:
        """POST /v2/logging: change settings of the log."""
        body = await http.body(INLINE_BYTES)
        try:
            values = await self._core.logging.change(read_object(body))
        except TritonError as error:
            await self._refuse(http, error, JSON)
        else:
            await http.respond(200, _encode(values))

    async def trace(self, http: RequestContext) -> None:
        """GET …/trace/setting: the trace settings of the server or of a model."""
        await self._respond_json(http, lambda: self._core.trace_settings.values(self._traced_model(http)))

    async def set_trace(self, http: RequestContext) -> None:
        """POST …/trace/setting: change the trace settings of the server or of a model."""
        body = await http.body()
        try:
            values = await self._core.trace_settings.change(read_object(body), self._traced_model(http))
        except TritonError as error:
            await self._refuse(http, error, JSON)
        else:
            await http.respond(200, _encode(values))

    def _traced_model(self, http: RequestContext) -> str:
        """The model of the path, or OF_SERVER. Raises TritonError for an unknown model."""
        return self._core.traced_model(http.path.get("model", OF_SERVER))

    async def infer(self, http: RequestContext) -> None:
        """POST …/infer: run an inference that has one response. Errors in the body are JSON, as in Triton; other errors are plain text."""
        body = await http.body()
        async with http.cancel_on_disconnect():
            kind = PLAIN
            try:
                served = self._ready(http)
                if served.model.decoupled and not served.unary:
                    raise TritonError("HTTP end point doesn't support models with decoupled transaction policy", 501)
                kind = JSON
                call = await http.compute(self._read_infer, http, served, body)
                kind = PLAIN
                response = await self._infer(served, call.inference)
                is_long = sum(array.nbytes for array in response.outputs.values()) > INLINE_BYTES
                await http.respond(200, *await compute(self._write_infer, http, served, call, response, long=is_long))
            except StokerError as error:
                await self._refuse(http, error, kind)

    async def _infer(self, served: ServedModel, inference: Inference) -> Response:
        """The only response to the request. Raises TritonError if there are several."""
        try:
            return await self._core.single_response(served, inference)
        except NotOneResponseError:
            cure = "Send it to generate_stream, or with gRPC's ModelStreamInfer"
            raise TritonError(f"model '{served.model.name}' has several responses to this request. {cure}.") from None

    def _read_infer(self, http: RequestContext, served: ServedModel, body: bytes) -> InferCall:
        """The checked request in a body, which may be compressed."""
        body = self._decompress(http, body)
        return infer_json.read_infer_request(body, http.headers.get(infer_json.HEADER_LENGTH), served, self._core.shared_memory)

    def _decompress(self, http: RequestContext, body: bytes) -> bytes:
        """The body without its compression, if it has one."""
        return compression.decompress(body, http.headers.get(b"content-encoding", b""), self.context.settings.max_request_bytes)

    def _write_infer(
        self, http: RequestContext, served: ServedModel, call: InferCall, response: Response
    ) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
        """(body, content type, headers) of a response, which is compressed if the client accepts that."""
        body, header_length = infer_json.write_infer_response(served, call, response, self._core.shared_memory)
        headers = [] if header_length is None else [(infer_json.HEADER_LENGTH, b"%d" % header_length)]
        body, encoding = compression.compress(body, http.headers.get(b"accept-encoding", b""))
        if encoding:
            headers.append((b"content-encoding", encoding))
        return body, JSON if header_length is None else OCTETS, headers

    async def generate(self, http: RequestContext) -> None:
        """POST …/generate: run an inference with scalars or lists as inputs, and respond once."""
        body = await http.body()
        async with http.cancel_on_disconnect():
            try:
                served = self._ready(http)
                inference = await http.compute(self._read_generate, http, served, body)
                response = await self._core.single_response(served, inference)
            except StokerError as error:
                await self._refuse(http, error, JSON, model_error=400)
            else:
                await http.respond(200, generate_json.ResponseWriter(served, inference).body(response))

    async def generate_stream(self, http: RequestContext) -> None:
        """POST …/generate_stream: run an inference, and send each response as a server-sent event."""
        body = await http.body()
        async with http.cancel_on_disconnect():
            try:
                served = self._ready(http)
                inference = await http.compute(self._read_generate, http, served, body)
            except StokerError as error:
                await self._refuse(http, error, JSON)
                return
            await self._stream(http, served, inference)

    async def _stream(self, http: RequestContext, served: ServedModel, inference: Inference) -> None:
        """Send one event per response."""
        writer = generate_json.ResponseWriter(served, inference)
        try:
            async with aclosing(self._core.responses(served, inference)) as responses:
                async for batch in responses:
                    if not http.started:
                        await http.open_stream()
                    if events := [writer.event(response) for response in batch if response.has_outputs]:
                        await http.send(b"".join(events))
            if not http.started:
                await http.open_stream()
        except StokerError as error:  # also written as an event; the status is the error's if the response has not started
            event = generate_json.error_event(client_message(error))
            if not http.started:
                failure = describe(error)
                await http.respond(_model_status(failure.status), event, EVENT_STREAM, failure.headers)
                return
            await http.send(event)
        await http.close_stream()

    def _read_generate(self, http: RequestContext, served: ServedModel, body: bytes) -> Inference:
        """The checked body. Raises TritonError."""
        return generate_json.read_generate_request(read_object(self._decompress(http, body)), served)

    def failure_body(self, failure: Failure) -> bytes:
        """Triton's format, with Triton's text for unknown paths and methods."""
        messages = {RouteError.code: "Not Found", MethodError.code: "Method Not Allowed"}
        return _encode({"error": messages.get(failure.code, failure.message)})

    async def _respond_json(self, http: RequestContext, value: Callable[[], Any]) -> None:
        """Respond with the result of `value` as JSON, or with a TritonError in the format of Triton's control endpoints."""
        try:
            body = _encode(value())
        except TritonError as error:
            await self._refuse(http, error, JSON)
        else:
            await http.respond(200, body)

    async def _refuse(self, http: RequestContext, error: StokerError, kind: bytes, *, model_error: int | None = None) -> None:
        """Send an error response with the content type `kind`. `model_error`: the status of an error inside the model, instead of 500."""
        failure = describe(error)
        status = model_error if model_error and failure.status == 500 and not isinstance(error, TritonError) else failure.status
        await http.respond(status, _encode({"error": client_message(error)}), kind, failure.headers)

    def _find(self, http: RequestContext) -> ServedModel:
        """The model of the path. Raises UnknownModelError."""
        return self._core.catalogue.find(http.path["model"], http.path.get("version"))

    def _ready(self, http: RequestContext) -> ServedModel:
        """The model of the path. Raises TritonError if it is unknown or not ready."""
        return self._core.catalogue.ready(http.path["model"], http.path.get("version"))


def _model_status(status: int) -> int:
    """The status of generate_stream for an error inside the model: 400 instead of 500, as in Triton."""
    return 400 if status == 500 else status
