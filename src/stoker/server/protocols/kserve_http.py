"""KServe v2 over HTTP: health, and Triton's generate extension."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.base.types import Delta, FinishReason, GenerationRequest, TokenLogprobs
from stoker.frontend.service import Choice, Service
from stoker.server.errors import Failure, MethodError, RouteError, describe, sequence_error
from stoker.server.exchange import EVENT_STREAM, PLAIN, Exchange
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.kserve.ensemble import to_request
from stoker.server.protocols.kserve.flat import read_inputs
from stoker.server.schemas.triton_models import TritonModel, TritonOptions, tensors

MODEL = "/v2/models/{model}"
VERSIONED = MODEL + "/versions/{version}"
ALIASES = ("ensemble", "tensorrt_llm_bls")  # of the one model, when no repository names others

_encode = msgspec.json.encode


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class KServeHTTP(Protocol):
    prefixes = ("/v2",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        options = context.settings.options
        self._options = options if isinstance(options, TritonOptions) else TritonOptions()

    def endpoints(self) -> list[Endpoint]:
        found = [Endpoint("GET", "/v2/health/live", self.live, open=True), Endpoint("GET", "/v2/health/ready", self.ready, open=True)]
        for base in (MODEL, VERSIONED):
            found += [
                Endpoint("GET", f"{base}/ready", self.model_ready, open=True),
                Endpoint("POST", f"{base}/generate", self.generate),
                Endpoint("POST", f"{base}/generate_stream", self.generate_stream),
            ]
        return found

    async def live(self, exchange: Exchange) -> None:
        await exchange.respond(200, content_type=PLAIN)

    async def ready(self, exchange: Exchange) -> None:
        await exchange.respond(200 if self.context.repository.ready else 503, content_type=PLAIN)

    async def model_ready(self, exchange: Exchange) -> None:
        try:
            self._service(exchange.path)
        except StokerError:
            await exchange.respond(400, _encode({"error": "Model version not ready"}), PLAIN)
        else:
            await exchange.respond(200, content_type=PLAIN)

    async def generate(self, exchange: Exchange) -> None:
        async with exchange.attended():
            service, request, reply = await self._read(exchange)
            completion = await service.complete(request)
            choice = completion.choices[0]
            if choice.finish_reason is FinishReason.ERROR:
                raise sequence_error(choice.error, ready=service.ready)
            await exchange.respond(200, reply.whole(choice, self._echo(request, reply, service)))

    async def generate_stream(self, exchange: Exchange) -> None:
        async with exchange.attended():
            service, request, reply = await self._read(exchange)
            try:
                async with aclosing(service.stream(request)) as batches:
                    async for deltas in batches:
                        if not exchange.started:
                            await exchange.open_stream()
                        if data := b"".join([reply.event(delta, service) for delta in deltas]):
                            await exchange.send(data)
            except StokerError as error:  # what a model refuses is an event too, with the error's status
                if exchange.started:
                    raise
                failure = describe(error)
                await exchange.respond(failure.status, _event({"error": failure.message}), EVENT_STREAM, failure.headers)
            else:
                await exchange.close_stream()

    def failure_body(self, failure: Failure) -> bytes:
        """Triton's shape; its own words where it has some."""
        words = {RouteError.code: "Not Found", MethodError.code: "Method Not Allowed"}
        return _encode({"error": words.get(failure.code, failure.message)})

    async def _read(self, exchange: Exchange) -> tuple[Service, GenerationRequest, Reply]:
        service, model = self._service(exchange.path)
        body = await exchange.json()
        values, request_id = read_inputs(body, model.inputs, model.name)
        request = to_request(values, request_id, service, self.context.settings)
        return service, request, Reply(model.name, exchange.path.get("version", "1"), request_id, values)

    def _service(self, path: dict[str, Any]) -> tuple[Service, TritonModel]:
        """The model that a path names: one of the repository's, or the names that Triton clients expect."""
        name, version = path["model"], path.get("version")
        inputs, outputs = tensors("ensemble")
        model = next((m for m in self._options.models if m.name == name), None)
        if model is None:
            model = TritonModel(name=name, kind="ensemble", decoupled=True, inputs=inputs, outputs=outputs)
        elif model.kind not in ("ensemble", "tensorrt_llm_bls"):
            raise UnknownModelError(name)
        if any(m.name == name for m in self.context.repository.models()):
            return self.context.repository.service(name, version), model
        if name in ALIASES or model in self._options.models:
            return self.context.default_service(), model
        raise UnknownModelError(name)

    def _echo(self, request: GenerationRequest, reply: Reply, service: Service) -> str:
        """A whole answer repeats the prompt, as TensorRT-LLM does, unless exclude_input_in_output says otherwise."""
        excluded = reply.values.get("exclude_input_in_output", self._options.exclude_input_in_output)
        return "" if excluded else str(request.prompt)


class Reply:
    """The outputs of an ensemble as generate writes them: keys in order of the alphabet."""

    def __init__(self, model: str, version: str, request_id: str | None, values: dict[str, Any]) -> None:
        self.values = values
        self._frame: dict[str, Any] = {
            "context_logits": 0.0, "cum_log_probs": 0.0, "generation_logits": 0.0, **({"id": request_id} if request_id is not None else {}),
            "model_name": model, "model_version": version, "output_log_probs": 0.0, "sequence_end": False, "sequence_id": 0,
            "sequence_start": False,
        }  # fmt: skip
        self._with_scores = bool(values.get("return_log_probs"))
        self._score = 0.0
        self._before = b"data: " + _encode({**self._frame, "text_output": ""})[: -len(b'""}')]

    def whole(self, choice: Choice, echo: str) -> bytes:
        return _encode(self._outputs(echo + choice.text, choice.logprobs))

    def event(self, delta: Delta, service: Service) -> bytes:
        if delta.finish_reason is FinishReason.ERROR:
            return _event({"error": describe(sequence_error(delta.error, ready=service.ready)).message})
        if self._with_scores:
            return _event(self._outputs(delta.text, delta.logprobs))
        if not delta.text and delta.finish_reason is None:
            return b""
        return self._before + _encode(delta.text) + b"}\n\n"

    def _outputs(self, text: str, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        outputs = {**self._frame, "text_output": text}
        if self._with_scores:
            self._score += sum(entry.logprob for entry in logprobs)
            outputs |= {"cum_log_probs": self._score, "output_log_probs": [entry.logprob for entry in logprobs]}
        return outputs


class UnknownModelError(RouteError):
    """Triton's words for a model that does not exist."""

    code = "unknown_model"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.args = (f"Request for unknown model: '{name[:200]}' is not found",)
