"""The routes of OpenAI's API, and of the servers that extend it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stoker.base.errors import NotFoundError, RequestError
from stoker.base.registry import nearest
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.exchange import Exchange
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.openai import kinds, wire
from stoker.server.protocols.openai.chat import chat
from stoker.server.protocols.openai.completions import complete
from stoker.server.protocols.openai.reasoning import REASONING_PARSERS
from stoker.server.protocols.openai.tools import TOOL_PARSERS

_TOKENIZE = ("model", "prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt", "continue_final_message")


class ModelError(NotFoundError):
    """The request names a model that is not served."""

    code = "model_not_found"
    field = "model"


class OpenAI(Protocol):
    prefixes = ("/v1", "/tokenize", "/detokenize")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if (parser := context.settings.tool_parser) is not None:
            TOOL_PARSERS.get(parser)  # a wrong name is told when the server starts
        if (parser := context.settings.reasoning_parser) is not None:
            REASONING_PARSERS.get(parser)
        self._created = int(time.time())

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/completions", self.completions),
            Endpoint("POST", "/v1/chat/completions", self.chat_completions),
            Endpoint("GET", "/v1/models", self.models),
            Endpoint("GET", "/v1/models/{model:path}", self.model),
            Endpoint("POST", "/tokenize", self.tokenize),
            Endpoint("POST", "/detokenize", self.detokenize),
        ]

    async def completions(self, exchange: Exchange) -> None:
        body = await exchange.json()
        await complete(exchange, self.context, self._service(body), body)

    async def chat_completions(self, exchange: Exchange) -> None:
        body = await exchange.json()
        await chat(exchange, self.context, self._service(body), body)

    async def models(self, exchange: Exchange) -> None:
        rows = [self._row(model.name, model.service) for model in self.context.repository.models() if model.service is not None]
        await exchange.respond(200, wire.encode({"object": "list", "data": rows}))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path["model"]
        await exchange.respond(200, wire.encode(self._row(name, self._named(name))))

    async def tokenize(self, exchange: Exchange) -> None:
        """{"prompt": text} or {"messages": […]} to token ids; add_special_tokens as in generation."""
        body = _known(await exchange.json(), _TOKENIZE)
        service = self._service(body)
        if not isinstance(body.get("prompt"), str) and body.get("messages") is None:
            raise RequestError("prompt", body.get("prompt"), "it must be text, or messages must be given")
        chatted = body.get("prompt") is None
        text = service.render_chat(body["messages"], **_switches(body)) if chatted else body["prompt"]
        special = kinds.boolean("add_special_tokens", body.get("add_special_tokens", not chatted))
        ids = await asyncio.to_thread(service.encode, text, add_special_tokens=special)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_seq_len, "tokens": ids}
        if kinds.boolean("return_token_strs", body.get("return_token_strs", False)):
            answer["token_strs"] = [wire.token_text(service, token) for token in ids]
        await exchange.respond(200, wire.encode(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """{"tokens": ids} to text, special tokens included."""
        body = _known(await exchange.json(), ("model", "tokens"))
        service = self._service(body)
        ids = kinds.list_of(kinds.whole(0, 1 << 31), 1 << 22)("tokens", body.get("tokens"))
        text = await asyncio.to_thread(service.decode, list(ids), skip_special_tokens=False)
        await exchange.respond(200, wire.encode({"prompt": text}))

    def failure_body(self, failure: Failure) -> bytes:
        return wire.failure_body(failure)

    def _service(self, body: dict[str, Any]) -> Service:
        """The service that a request names; without a name, the first."""
        name = body.get("model")
        if name is None:
            return self.context.default_service()
        return self._named(kinds.text(512)("model", name))

    def _named(self, name: str) -> Service:
        try:
            return self.context.repository.service(name)
        except NotFoundError as error:
            raise ModelError(error.message, cure=error.cure) from None

    def _row(self, name: str, service: Service) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "stoker", "root": name, "parent": None,
            "max_model_len": service.max_seq_len,
        }  # fmt: skip


def _known(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The body without its nulls. Raises RequestError for a field that is none of `names`."""
    for name, value in body.items():
        if name not in names:
            near = nearest(name, list(names)) or list(names)
            raise RequestError(name[:80], value, "there is no such field", cure=f"Use one of: {', '.join(near)}.")
    return {name: value for name, value in body.items() if value is not None}


def _switches(body: dict[str, Any]) -> dict[str, Any]:
    return {name: kinds.boolean(name, body[name]) for name in ("add_generation_prompt", "continue_final_message") if name in body}
