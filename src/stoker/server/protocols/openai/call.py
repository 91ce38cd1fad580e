"""What both doors read alike: sampling, streaming and the request's own settings."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.frontend.bad_words import bad_word_ids
from stoker.frontend.service import Service
from stoker.server.protocols.common.guides import read_guide
from stoker.server.protocols.openai.fields import BOTH, STREAM_OPTIONS, EndpointName, check_fields
from stoker.server.settings import ServerSettings

TEMPERATURE = 1.0  # OpenAI's default
_PARAMS = tuple((row.name, row.target) for row in BOTH if row.target)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False  # a last chunk without choices tells the usage
    continuous_usage_stats: bool = False  # every chunk does


class OpenAICall(msgspec.Struct, kw_only=True):
    """A checked request. `values` are the honoured fields that were given."""

    values: dict[str, Any]
    params: SamplingParams
    request_id: str
    stream: bool
    options: StreamOptions
    request_fields: dict[str, Any]  # of GenerationRequest, besides prompt, params and request_id

    def generation(self, prompt: str | list[int], index: int | None, **fields: Any) -> GenerationRequest:
        """The request of one prompt; `index` tells several of one call apart."""
        request_id = self.request_id if index is None else f"{self.request_id}-{index}"
        return GenerationRequest(request_id=request_id, prompt=prompt, params=self.params, **{**self.request_fields, **fields})


def read_openai_call(
    endpoint: EndpointName, body: dict[str, Any], service: Service, settings: ServerSettings, *, max_tokens: int
) -> OpenAICall:
    """Check every field. `max_tokens` is for requests that name none. Raises RequestError."""
    values = check_fields(endpoint, body)
    stream = values.get("stream", False)
    given: dict[str, Any] = {"temperature": TEMPERATURE, "skip_special_tokens": settings.skip_special_tokens}
    given["max_tokens"] = values.get("max_tokens", max_tokens)
    given |= {param: values[name] for name, param in _PARAMS if name in values}
    given |= _renamed(values, service)
    if values.get("use_beam_search"):
        given |= _beams(values)
    if stream and "prompt_logprobs" in values:
        raise RequestError("prompt_logprobs", values["prompt_logprobs"], "it is not streamed", cure="Ask without stream.")
    return OpenAICall(
        values=values,
        params=SamplingParams(**given),
        request_id=values.get("request_id") or values.get("rid") or uuid.uuid4().hex,
        stream=stream,
        options=_stream_options(values, stream),
        request_fields=_request_fields(values, service, settings),
    )


def _renamed(values: dict[str, Any], service: Service) -> dict[str, Any]:
    """Settings whose meaning differs from the SamplingParams field."""
    renamed: dict[str, Any] = {}
    if "top_k" in values:
        renamed["top_k"] = max(0, values["top_k"])
    if "bad_words" in values:
        renamed["bad_words"] = bad_word_ids("bad_words", values["bad_words"], service)
    if (guide := read_guide(values)) is not None:
        renamed["guide"] = guide
    return renamed


def _beams(values: dict[str, Any]) -> dict[str, Any]:
    """Beam search takes the best, so it does not sample; best_of is how many beams there are."""
    if values.get("stream"):
        raise RequestError("use_beam_search", True, "beams are not streamed", cure="Ask without stream.")
    beams = values.get("best_of", values.get("n", 1))
    return {"beam_width": beams, "n": values.get("n", 1), "temperature": 0.0}


def _stream_options(values: dict[str, Any], stream: bool) -> StreamOptions:
    given = values.get("stream_options")
    if given is None:
        return StreamOptions()
    if not stream:
        raise RequestError("stream_options", given, "it needs stream=true")
    return StreamOptions(**STREAM_OPTIONS.check(given, prefix="stream_options."))


def _request_fields(values: dict[str, Any], service: Service, settings: ServerSettings) -> dict[str, Any]:
    fields: dict[str, Any] = {name: values[name] for name in ("priority", "cache_salt", "add_special_tokens") if name in values}
    fields["timeout_s"] = values.get("timeout_s", settings.request_timeout_s)
    if (keep := values.get("truncate_prompt_tokens")) is not None:
        fields["truncate_prompt_tokens"] = service.info.limits.max_input_len if keep == -1 else keep
    return fields
