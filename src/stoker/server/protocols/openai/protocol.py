"""The endpoints of OpenAI's API, and /tokenize and /detokenize of vLLM."""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Any

from stoker.base.errors import NotFoundError, RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.common.client_names import with_client_name
from stoker.server.protocols.common.logprobs import token_text
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.selection import check_parser
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.protocols.openai import fields
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.batches.endpoints import Batches
from stoker.server.protocols.openai.batches.execution import Handlers
from stoker.server.protocols.openai.call import client_error
from stoker.server.protocols.openai.chat.response import chat
from stoker.server.protocols.openai.completions.response import complete
from stoker.server.protocols.openai.openapi import ERROR, OPERATIONS
from stoker.server.protocols.openai.responses.endpoints import Responses
from stoker.server.threads import LONG_TOKENS, compute


class ModelError(NotFoundError):
    """The request names a model that is not served."""

    code = "model_not_found"
    field = "model"


class OpenAI(Protocol):
    """Completions, chat completions, models, tokenization. Raises ConfigError for an unknown tool or reasoning parser."""

    prefixes = ("/v1", "/tokenize", "/detokenize", "/load")
    operations = OPERATIONS
    error_schema = ERROR

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        check_parser(TOOL_PARSERS, context.settings.tool_parser)  # raises for an unknown name when the server starts
        check_parser(REASONING_PARSERS, context.settings.reasoning_parser)
        self._created = int(time.time())
        self._responses = Responses(context, self._service)
        self._batches = Batches(context, self.handlers())

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/completions", self.completions),
            Endpoint("POST", "/v1/chat/completions", self.chat_completions),
            *self._responses.endpoints(),
            *self._batches.endpoints(),
            Endpoint("GET", "/v1/models", self.models),
            Endpoint("GET", "/v1/models/{model:path}", self.model),
            Endpoint("GET", "/load", self.load),
            Endpoint("POST", "/tokenize", self.tokenize),
            Endpoint("POST", "/detokenize", self.detokenize),
        ]

    def handlers(self) -> Handlers:
        """The handlers of the routes that batches may use."""
        return {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.completions,
            "/v1/responses": self._responses.create,
        }

    async def completions(self, http: RequestContext) -> None:
        """POST /v1/completions."""
        body = await http.json(long_lists=True)
        try:
            await complete(http, self.context, self._service(body), body)
        except RequestError as error:
            raise client_error(error, body) from None

    async def chat_completions(self, http: RequestContext) -> None:
        """POST /v1/chat/completions."""
        body = await http.json()
        try:
            await chat(http, self.context, self._service(body), body)
        except RequestError as error:
            raise client_error(error, body) from None

    async def models(self, http: RequestContext) -> None:
        """GET /v1/models: the ready models, in the form of OpenAI's API and Anthropic's."""
        rows = [self._model_object(model.name, model.service) for model in self.context.repository.models() if model.service is not None]
        ids = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None, "has_more": False}
        await http.respond(200, wire.encode({"object": "list", "data": rows, **ids}))

    async def model(self, http: RequestContext) -> None:
        """GET /v1/models/{model}. Raises ModelError."""
        name = http.path["model"]
        await http.respond(200, wire.encode(self._model_object(name, self._named(name))))

    async def load(self, http: RequestContext) -> None:
        """GET /load: the number of requests that run or wait, as in vLLM. The last known one while the executor does not answer."""
        known = (await self.context.metrics.statistics.read(self.context.repository)).values()
        await http.respond(200, wire.encode({"server_load": sum(each.stats.num_running + each.stats.num_waiting for each in known)}))

    async def tokenize(self, http: RequestContext) -> None:
        """Convert {"prompt": text} or {"messages": […]} to token ids. add_special_tokens has the same defaults as in generation."""
        values = fields.TOKENIZE.check(await http.json())
        service = self._service(values)
        if not isinstance(values.get("prompt"), str) and "messages" not in values:
            raise RequestError("prompt", values.get("prompt"), "it must be text, or the request must have messages")
        is_chat = "prompt" not in values
        text = await service.render_chat(values["messages"], **_template_values(values)) if is_chat else values["prompt"]
        ids = await asyncio.to_thread(service.encode, text, add_special_tokens=values.get("add_special_tokens", not is_chat))
        response: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_seq_len, "tokens": ids}
        if values.get("return_token_strs"):
            response["token_strs"] = await compute(_token_texts, service, ids, long=len(ids) > LONG_TOKENS)
        await http.respond(200, wire.encode(response))

    async def detokenize(self, http: RequestContext) -> None:
        """Convert {"tokens": ids} to text. The text contains special tokens."""
        body = await http.json(long_lists=True)
        service = self._service(body)
        if isinstance(tokens := body.get("tokens"), list) and len(tokens) > service.max_seq_len:
            raise RequestError("tokens", tokens, f"it has {len(tokens)} ids, and a sequence has at most {service.max_seq_len}")
        values = await compute(fields.DETOKENIZE.check, body, long=isinstance(tokens, list) and len(tokens) > LONG_TOKENS)
        if "tokens" not in values:
            raise RequestError("tokens", None, "it is missing")
        try:
            text = await asyncio.to_thread(service.decode, list(values["tokens"]), skip_special_tokens=False)
        except RequestError as error:
            raise with_client_name(error, {"token_ids": "tokens"}, {}) from None
        await http.respond(200, wire.encode({"prompt": text}))

    def failure_body(self, failure: Failure) -> bytes:
        return wire.failure_body(failure)

    def _service(self, body: dict[str, Any]) -> Service:
        """The service of the model that a request names; without a name, the first model."""
        name = body.get("model")
        if name is None:
            return self.context.default_service()
        try:
            return self._named(fields.MODEL_NAME.check(name))
        except InvalidValueError as error:
            raise error.request_error("model") from None

    def _named(self, name: str) -> Service:
        """The service of the model with this name. Raises ModelError if there is none."""
        try:
            return self.context.repository.service(name)
        except NotFoundError as error:
            raise ModelError(error.message, cure=error.cure) from None

    def _model_object(self, name: str, service: Service) -> dict[str, Any]:
        """OpenAI's object of a model."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "stoker",
            "root": name,
            "parent": None,
            "max_model_len": service.max_seq_len,
            "type": "model",  # this and the following for Anthropic's clients, which use the same route
            "display_name": name,
            "created_at": datetime.datetime.fromtimestamp(self._created, datetime.UTC).isoformat(),
        }


def _token_texts(service: Service, ids: list[int]) -> list[str]:
    """The text of each token."""
    return [token_text(service, token) for token in ids]


def _template_values(values: dict[str, Any]) -> dict[str, Any]:
    """The template's values from a request to /tokenize. An answer that is continued gets no new generation prompt."""
    chosen: dict[str, Any] = {name: values[name] for name in ("add_generation_prompt", "continue_final_message") if name in values}
    return {"add_generation_prompt": False, **chosen} if chosen.get("continue_final_message") else chosen
