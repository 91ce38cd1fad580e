"""Names and attributes of spans, with OpenTelemetry's semantic conventions for HTTP, RPC and generative AI."""

from __future__ import annotations

from typing import Any

from stoker.base.types import PrefillChunk, SamplingParams, Timings
from stoker.server.telemetry.record import Generation, RequestRecord

PROVIDER = "stoker"
_CHAT_ROUTES = ("chat", "messages", "responses")  # parts of the routes of chat requests
_TOP_K_OFF = 0


def span_name(record: RequestRecord) -> str:
    """The name of the span of a request: operation and model if it generated, otherwise method and route."""
    if record.generations:
        return f"{operation(record)} {record.generations[0].model}"
    return f"{record.method} {record.route}"


def operation(record: RequestRecord) -> str:
    """The value of gen_ai.operation.name."""
    return "chat" if any(part in record.route for part in _CHAT_ROUTES) else "text_completion"


def request_attributes(record: RequestRecord) -> dict[str, Any]:
    """The attributes of the span of a request."""
    attributes: dict[str, Any] = {"client.address": record.client, "stoker.request.id": record.request_id}
    if record.protocol == "grpc":
        attributes |= {"rpc.system": "grpc", "rpc.method": record.route}
    else:
        attributes |= {"http.request.method": record.method, "http.route": record.route, "http.response.status_code": record.status}
    if record.key:
        attributes["enduser.id"] = record.key
    if is_failure(record):
        attributes["error.type"] = record.error or str(record.status)
    if record.generations:
        attributes |= _generation_attributes(record)
    return attributes


def is_failure(record: RequestRecord) -> bool:
    """Whether the request failed because of the server."""
    return record.status >= 500 or any(generation.finish_reason == "error" for generation in record.generations)


def _generation_attributes(record: RequestRecord) -> dict[str, Any]:
    """The attributes of generative AI of a request."""
    first, usage = record.generations[0], record.usage()
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": first.model,
        "gen_ai.response.model": first.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [str(generation.finish_reason) for generation in record.generations],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if (first_s := record.time_to_first_token_s) is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_s
    return attributes | (_parameters(first.params) if first.params is not None else {})


def _parameters(params: SamplingParams) -> dict[str, Any]:
    """The attributes of the sampling parameters."""
    attributes: dict[str, Any] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    if params.top_k != _TOP_K_OFF:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.n != 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if params.seed is not None and params.seed < 1 << 63:
        attributes["gen_ai.request.seed"] = params.seed
    if params.stop:
        attributes["gen_ai.request.stop_sequences"] = list(params.stop)
    return attributes


def prefill_attributes(chunk: PrefillChunk) -> dict[str, Any]:
    """The attributes of the span of one step that computed a part of the prompt."""
    return {"stoker.prefill.tokens": chunk.num_tokens}


def generation_attributes(generation: Generation) -> dict[str, Any]:
    """The attributes of the span of the decode steps."""
    return {"gen_ai.usage.output_tokens": generation.usage.completion_tokens}


def detokenize_attributes(timings: Timings) -> dict[str, Any]:
    """The attributes of the span of detokenization, which lasts from the first to the last token: the time that it was busy."""
    return {"stoker.detokenize.busy_seconds": timings.detokenize_s}
