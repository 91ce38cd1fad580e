"""The endpoints of a Truss model server."""

from __future__ import annotations

from typing import Any

from stoker.frontend.repository import ModelState
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.openai.chat.response import chat as openai_chat
from stoker.server.protocols.openai.completions.response import complete as openai_complete
from stoker.server.protocols.truss.body import read_object
from stoker.server.protocols.truss.errors import NOT_READY, failure_body, refuse, refuse_error
from stoker.server.protocols.truss.openapi import ERROR, OPERATIONS
from stoker.server.protocols.truss.options import TrussOptions
from stoker.server.protocols.truss.predict import respond_predict
from stoker.server.protocols.truss.request import read_predict_call

CHAT = "/v1/chat/completions"


class Truss(Protocol):
    """The :predict endpoints and, if the settings name this protocol, the other endpoints of a Truss.

    The model name in a path is ignored.
    """

    operations = OPERATIONS
    error_schema = ERROR

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        options = context.settings.options
        self._options = options if isinstance(options, TrussOptions) else TrussOptions()
        self._named = "truss" in context.settings.protocols
        self.prefixes = ("/",) if self._named else ()

    def endpoints(self) -> list[Endpoint]:
        predicts = [Endpoint("POST", f"/v1/models/{{model}}:{verb}", self.predict) for verb in ("predict", "predict_binary")]
        if not self._named:
            return predicts
        return [
            Endpoint("GET", "/", self.live, open=True),
            Endpoint("GET", "/ping", self.loaded, open=True),
            Endpoint("GET", "/v1/models/{model}", self.ready, open=True),
            Endpoint("GET", "/v1/models/{model}/loaded", self.loaded, open=True),
            Endpoint("GET", "/v1/models/{model}/schema", self.schema),
            *predicts,
            Endpoint("POST", "/invocations", self.predict),
            Endpoint("POST", "/v1/embeddings", self.embeddings),
        ]

    async def live(self, http: RequestContext) -> None:
        """GET /: the process is running."""
        await http.respond(200, b"true")

    async def ready(self, http: RequestContext) -> None:
        """Status 200 if every model is ready."""
        await self._respond_state(http, self.context.repository.ready)

    async def loaded(self, http: RequestContext) -> None:
        """Status 200 if every model is loaded, even if its executor does not answer."""
        await self._respond_state(http, self._loaded)

    async def schema(self, http: RequestContext) -> None:
        """GET …/schema: an error, because the models of Stoker have no schema. The status depends on whether they are loaded."""
        if self._loaded:
            return await refuse(http, 404, "No schema found", b"600")
        return await refuse(http, 503, "Schema not available, please try again later.")

    async def embeddings(self, http: RequestContext) -> None:
        """The error of a Truss whose Model has no method `embeddings`."""
        await refuse(http, 404, "`embeddings` must only be called if model has it.")

    async def predict(self, http: RequestContext) -> None:
        """Generate. As in the Truss server, readiness is checked before the body."""
        try:
            service = self.context.default_service()
            body = await read_object(http)
            async with http.cancel_on_disconnect():
                await self._predict(http, service, body)
        except ConnectionResetError:
            raise
        except Exception as error:
            if http.started:
                raise
            await refuse_error(http, error)

    def failure_body(self, failure: Failure) -> bytes:
        return failure_body(failure)

    async def _predict(self, http: RequestContext, service: Service, body: dict[str, Any]) -> None:
        """Respond in the format of the body: legacy, chat or completions."""
        if not self._has_openai_format(body):
            call = await read_predict_call(body, service, self.context.settings, self._options)
            return await respond_predict(http, service, call)
        unnamed = {name: value for name, value in body.items() if name != "model"}  # the path names the model
        route = self._options.default_route
        if route == CHAT or (route is None and "messages" in body):
            return await openai_chat(http, self.context, service, unnamed)
        return await openai_complete(http, self.context, service, unnamed)

    def _has_openai_format(self, body: dict[str, Any]) -> bool:
        """Whether the body of a :predict request is one of OpenAI's API, by the options and its member `model`."""
        options = self._options
        return options.openai or options.default_route is not None or ("model" in body and not options.legacy)

    @property
    def _loaded(self) -> bool:
        """Whether every model is loaded."""
        models = self.context.repository.models()
        return bool(models) and all(model.state is ModelState.READY for model in models)

    async def _respond_state(self, http: RequestContext, good: bool) -> None:
        """Status 200 if `good`, otherwise 503."""
        if good:
            await http.respond(200, b"{}")
        else:
            await refuse(http, 503, NOT_READY)
