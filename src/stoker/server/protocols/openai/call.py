"""The fields that completions and chat completions share: sampling, streaming, and settings of the request."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.frontend.bad_words import bad_word_ids
from stoker.frontend.service import Service
from stoker.server.protocols.common.client_names import with_client_name
from stoker.server.protocols.common.guides import guide_field, read_guide
from stoker.server.protocols.openai.fields import BOTH, STREAM_OPTIONS, EndpointName, check_fields
from stoker.server.settings import ServerSettings

DEFAULT_TEMPERATURE = 1.0  # OpenAI's default
_PARAMS = tuple((row.name, row.target) for row in BOTH if row.target)  # (field, SamplingParams field)


class StreamOptions(msgspec.Struct, frozen=True):
    """The field stream_options."""

    include_usage: bool = False  # a last chunk without choices contains the usage
    continuous_usage_stats: bool = False  # every chunk contains the usage so far


class OpenAICall(msgspec.Struct, kw_only=True):
    """A checked request. `values` are its accepted fields."""

    values: dict[str, Any]
    params: SamplingParams
    request_id: str
    stream: bool
    options: StreamOptions
    request_fields: dict[str, Any]  # fields of GenerationRequest other than prompt, params and request_id
    prompt_logprobs: bool  # the response has the member prompt_logprobs, which is null if the request's field is

    @property
    def detokenize(self) -> bool:
        """Whether the response contains text."""
        return self.values.get("detokenize") is not False

    @property
    def token_ids(self) -> bool:
        """Whether the response contains token ids."""
        return self.values.get("return_token_ids") is True

    def generation(self, prompt: str | list[int], index: int | None, **fields: Any) -> GenerationRequest:
        """The GenerationRequest of one prompt; `index` distinguishes the prompts of one call."""
        request_id = self.request_id if index is None else f"{self.request_id}-{index}"
        return GenerationRequest(request_id=request_id, prompt=prompt, params=self.params, **{**self.request_fields, **fields})


def read_openai_call(
    endpoint: EndpointName, body: dict[str, Any], service: Service, settings: ServerSettings, *, max_tokens: int
) -> OpenAICall:
    """Check every field. `max_tokens` is the default of the endpoint. Raises RequestError."""
    values = check_fields(endpoint, body)
    stream = values.get("stream", False)
    params: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE, "skip_special_tokens": settings.skip_special_tokens}
    params["max_tokens"] = values.get("max_tokens", max_tokens)
    params |= {param: values[name] for name, param in _PARAMS if name in values}
    params |= _converted(values, service)
    if values.get("use_beam_search"):
        params |= _beam_params(values)
    if stream and "prompt_logprobs" in values:
        raise RequestError("prompt_logprobs", values["prompt_logprobs"], "it is not streamed", cure="Set stream=false.")
    if values.get("detokenize") is False and "stop" in values:
        raise RequestError("stop", values["stop"], "detokenize=false produces no text", cure="Use stop_token_ids.")
    return OpenAICall(
        values=values,
        params=SamplingParams(**params),
        request_id=values.get("request_id") or values.get("rid") or uuid.uuid4().hex,
        stream=stream,
        options=_stream_options(values, stream),
        request_fields=_request_fields(values, service, settings),
        prompt_logprobs="prompt_logprobs" in body and not stream,
    )


def client_error(error: RequestError, body: dict[str, Any]) -> RequestError:
    """The error with the field's name and value in the client's request, where Stoker's own name of the field differs."""
    names = {
        "prompt": "messages" if "messages" in body else "prompt",
        "prompt_ids": "messages" if "messages" in body else "prompt",
        "beam_width": "best_of" if "best_of" in body else "n",
        "guide": guide_field(body) or "tools",
        "prompt_logprobs": "logprobs",  # of completions with echo
    }
    if "max_completion_tokens" in body:
        names["max_tokens"] = "max_completion_tokens"
    return with_client_name(error, names, body)


def _converted(values: dict[str, Any], service: Service) -> dict[str, Any]:
    """SamplingParams fields whose value or name differs from the request's field."""
    converted: dict[str, Any] = {}
    if "top_k" in values:
        converted["top_k"] = max(0, values["top_k"])
    if "bad_words" in values:
        converted["bad_words"] = bad_word_ids("bad_words", values["bad_words"], service)
    if (guide := read_guide(values)) is not None:
        converted["guide"] = guide
    return converted


def _beam_params(values: dict[str, Any]) -> dict[str, Any]:
    """Beam search with best_of beams. It does not sample, so the temperature is 0."""
    if values.get("stream"):
        raise RequestError("use_beam_search", True, "beams are not streamed", cure="Set stream=false.")
    width = values.get("best_of", values.get("n", 1))
    return {"beam_width": width, "n": values.get("n", 1), "temperature": 0.0}


def _stream_options(values: dict[str, Any], stream: bool) -> StreamOptions:
    """The checked field stream_options. Raises RequestError."""
    options = values.get("stream_options")
    if options is None:
        return StreamOptions()
    if not stream:
        raise RequestError("stream_options", options, "it requires stream=true")
    checked = STREAM_OPTIONS.check(options, prefix="stream_options.")
    continuous = checked.get("continuous_usage_stats", False)
    include_usage = checked.get("include_usage", continuous)
    return StreamOptions(include_usage, continuous and include_usage)


def _request_fields(values: dict[str, Any], service: Service, settings: ServerSettings) -> dict[str, Any]:
    """Fields of GenerationRequest other than prompt, params and request_id."""
    fields: dict[str, Any] = {
        name: values[name] for name in ("priority", "cache_salt", "add_special_tokens", "truncation_side") if name in values
    }
    fields["timeout_s"] = values.get("timeout_s", settings.request_timeout_s)
    if (num_tokens := values.get("truncate_prompt_tokens")) is not None:
        fields["truncate_prompt_tokens"] = service.info.limits.max_input_len if num_tokens == -1 else num_tokens
    return fields
