"""The endpoints of a SageMaker container and of the SageMaker runtime API, so that boto3 can call this server directly."""

from __future__ import annotations

import datetime
from typing import Any
from urllib.parse import parse_qs

from stoker.base.errors import NotFoundError, RequestError, StokerError
from stoker.frontend.repository import NOT_LOADED, Model, ModelState
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.openai.chat.response import chat as openai_chat
from stoker.server.protocols.openai.completions.response import complete as openai_complete
from stoker.server.protocols.sagemaker.chat import chat
from stoker.server.protocols.sagemaker.errors import NoModelError, indented_json, management_body
from stoker.server.protocols.sagemaker.generate import generate
from stoker.server.protocols.sagemaker.openapi import ERROR, OPERATIONS
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.reply import FIXED_HEADERS, JsonLinesContext, PlatformReply, PlatformStream, Reply
from stoker.server.protocols.sagemaker.request import read_invocation_call, read_object


class SageMaker(Protocol):
    """/ping and /invocations of every container, /predictions and /models of the DJL server, /endpoints of the SageMaker runtime."""

    prefixes = ("/ping", "/invocations", "/predictions", "/models", "/endpoints")
    operations = OPERATIONS
    error_schema = ERROR

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        options = context.settings.options
        self._options = options if isinstance(options, LMIOptions) else LMIOptions()
        self._started = datetime.datetime.now(datetime.UTC)

    def endpoints(self) -> list[Endpoint]:
        pings = [Endpoint(method, "/ping", self.ping, open=True) for method in ("GET", "POST")]
        posts = {
            "/invocations": self.invocations,
            "/predictions/{model}": self.predictions,
            "/predictions/{model}/{version}": self.predictions,
            "/models/{model}/invoke": self.predictions,
            "/endpoints/{endpoint}/invocations": self.endpoint,
            "/endpoints/{endpoint}/invocations-response-stream": self.endpoint_stream,
        }
        gets = {"/models": self.models, "/models/{model}": self.model}
        return [
            *pings,
            *(Endpoint("POST", path, handler) for path, handler in posts.items()),
            *(Endpoint("GET", path, handler) for path, handler in gets.items()),
        ]

    async def ping(self, http: RequestContext) -> None:
        """Status 200 if every model is ready, 500 if one has failed, otherwise 503. The body has the state of each model and the reason."""
        models = self.context.repository.models()
        states = {model.name: _state(model) for model in models}
        failed = any(_status(model) == "Failed" for model in models)
        status = 200 if self.context.repository.ready else 500 if failed else 503
        await http.respond(status, indented_json(states), headers=FIXED_HEADERS)

    async def models(self, http: RequestContext) -> None:
        """GET /models of the DJL server: names and statuses."""
        statuses = {"Healthy": "READY", "Failed": "FAILED"}
        rows = [
            {"modelName": m.name, "modelUrl": f"stoker:///{m.name}", "status": statuses.get(_status(m), "PENDING")}
            for m in self.context.repository.models()
        ]
        await http.respond(200, indented_json({"models": rows}), headers=FIXED_HEADERS)

    async def model(self, http: RequestContext) -> None:
        """GET /models/{model} of the DJL server: a model with its workers."""
        name = http.path["model"]
        try:
            model = self.context.repository.find(name)
        except NotFoundError:
            raise NoModelError(f"Workflow not found: {name[:80]}") from None
        await http.respond(200, indented_json([{"workflowName": name, "models": [await self._describe(model)]}]), headers=FIXED_HEADERS)

    async def invocations(self, http: RequestContext) -> None:
        """POST /invocations: generate with the model that the query or a header names, or else the default one."""
        await self._respond(http, Reply(http), *self._queried_model(http))

    async def predictions(self, http: RequestContext) -> None:
        """POST /predictions/{model} of the DJL server: generate."""
        await self._respond(http, Reply(http), http.path["model"], http.path.get("version"))

    async def endpoint(self, http: RequestContext) -> None:
        """POST /endpoints/{name}/invocations, SageMaker's InvokeEndpoint: generate."""
        await self._respond(http, PlatformReply(http))

    async def endpoint_stream(self, http: RequestContext) -> None:
        """POST /endpoints/{name}/invocations-response-stream, InvokeEndpointWithResponseStream: generate."""
        await self._respond(http, PlatformStream(http))

    def failure_body(self, failure: Failure) -> bytes:
        return management_body(failure)

    async def _respond(self, http: RequestContext, reply: Reply, name: str | None = None, version: str | None = None) -> None:
        """Read the body, generate and respond. Errors before the first byte of the response are written by `reply`."""
        try:
            _refuse_paging(http)
            service = self._service(name, version)
            body = await http.compute(read_object, await http.body(), self._options)
            async with http.cancel_on_disconnect():
                await self._respond_to_body(reply, service, body)
        except NoModelError:
            raise
        except StokerError as error:
            if http.started:
                raise
            await reply.refuse(error)

    async def _respond_to_body(self, reply: Reply, service: Service, body: dict[str, Any]) -> None:
        """Respond in the schema of the body: inputs, messages or (async dialect) prompt."""
        settings, options = self.context.settings, self._options
        if "inputs" in body:
            call = await read_invocation_call(body, service, settings, options)
            return await generate(reply, service, call, options)
        if options.dialect != "async":
            return await chat(reply, service, body, settings)
        unnamed = {name: value for name, value in body.items() if name != "model"}
        json_lines: Any = JsonLinesContext(reply)
        if "messages" in body:
            return await openai_chat(json_lines, self.context, service, unnamed)
        return await openai_complete(json_lines, self.context, service, unnamed)

    def _queried_model(self, http: RequestContext) -> tuple[str | None, str | None]:
        """(name, version) of the model in the query string, as in the DJL server; None for what is absent."""
        query = parse_qs(http.query.decode("latin-1"))
        return next(iter(query.get("model_name", [])), None), next(iter(query.get("model_version", [])), None)

    def _service(self, name: str | None, version: str | None) -> Service:
        """The service of the model, by default the default one. Raises NoModelError for an unknown model."""
        if name is None:
            return self.context.default_service()
        try:
            return self.context.repository.service(name, version)
        except NotFoundError:
            raise NoModelError(f"Model or workflow not found: {name[:80]}") from None

    async def _describe(self, model: Model) -> dict[str, Any]:
        """A model in the format of the DJL server's management API."""
        limits = model.service.info.limits if model.service is not None else None
        waiting = (await model.service.stats()).num_waiting if model.service is not None and model.ready else 0
        worker = {"id": 1, "startTime": f"{self._started:%Y-%m-%dT%H:%M:%S}.000Z", "status": "READY" if model.ready else "UNLOADED"}
        device = {"deviceType": model.service.info.device if model.service is not None else "none", "deviceId": -1}
        return {
            "modelName": model.name,
            "modelUrl": f"stoker:///{model.name}",
            "batchSize": self._options.batch_size,
            "maxRollingBatchSize": limits.max_batch_size if limits is not None else None,
            "requestInQueue": waiting,
            "status": _status(model),
            "loadedAtStartup": True,
            "workerGroups": [{"device": device, "minWorkers": 1, "maxWorkers": 1, "workers": [worker]}],
        }


def _refuse_paging(http: RequestContext) -> None:
    """Raise RequestError for the headers that request a paged response, which the DJL server stores between requests."""
    for name, harmless in ((b"x-synchronous", b"true"), (b"x-starting-token", b"")):
        if http.headers.get(name, harmless).lower() != harmless:
            value = http.headers[name].decode("latin-1")
            raise RequestError(name.decode(), value, "responses are not stored", cure="Leave the header out, or set stream=true.")


def _state(model: Model) -> dict[str, str]:
    """The status of a model, with the reason unless it is Healthy."""
    status = _status(model)
    return {"status": status} | ({} if status == "Healthy" else {"reason": model.reason or "its executor does not answer"})


def _status(model: Model) -> str:
    """Healthy, Loading, Draining or Failed."""
    if model.ready:
        return "Healthy"
    if model.state is ModelState.UNAVAILABLE and model.reason == NOT_LOADED:
        return "Loading"  # another model is being loaded first
    if model.state is ModelState.READY and model.reason:
        return "Loading"  # its executor is started again
    return {ModelState.LOADING: "Loading", ModelState.DRAINING: "Draining"}.get(model.state, "Failed")
