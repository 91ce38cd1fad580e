"""A legacy request body, checked and converted to a GenerationRequest with a tokenized prompt."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.frontend.bad_words import bad_word_ids
from stoker.frontend.prompts import encode_prompt
from stoker.frontend.service import Service
from stoker.server.protocols.truss import parameters
from stoker.server.protocols.truss.options import TrussOptions
from stoker.server.settings import ServerSettings

_DIRECT = parameters.TABLE.targets()  # field → SamplingParams field
_SAMPLED = ("temperature", "top_k", "top_p")


class PredictCall(msgspec.Struct, kw_only=True):
    """A checked request. If max_tokens leaves no room for new tokens, `request` is None and `text` is the whole answer."""

    stream: bool
    request: GenerationRequest | None = None
    text: str = ""


async def read_predict_call(body: dict[str, Any], service: Service, settings: ServerSettings, options: TrussOptions) -> PredictCall:
    """Check a request body. Raises RequestError with the name of the field."""
    values = parameters.TABLE.check(body)
    ids = await _prompt(values, service, settings)
    stream, max_tokens = values.get("stream", True), _max_tokens(values, settings)
    if options.max_tokens_counts_prompt and "max_new_tokens" not in values:
        if max_tokens <= len(ids):
            return PredictCall(stream=stream, text=service.decode(ids[:max_tokens]))
        max_tokens -= len(ids)
    params = _sampling(values, service, settings, max_tokens)
    request = GenerationRequest(request_id=uuid.uuid4().hex, prompt=ids, params=params, timeout_s=settings.request_timeout_s)
    return PredictCall(stream=stream, request=request)


async def _prompt(values: dict[str, Any], service: Service, settings: ServerSettings) -> list[int]:
    """The token ids of `prompt` or of the rendered `messages`."""
    if "prompt" in values and "messages" in values:
        raise RequestError("messages", "…", "a prompt is given too", cure="Send one of them.")
    if "messages" in values:
        prompt = await service.render_chat(list(values["messages"]))
        return await encode_prompt(service, prompt, add_special_tokens=False)
    if "prompt" not in values:
        raise RequestError("prompt", None, "it is missing")
    return await encode_prompt(service, values["prompt"], add_special_tokens=settings.add_special_tokens)


def _max_tokens(values: dict[str, Any], settings: ServerSettings) -> int:
    """max_tokens or max_new_tokens, by default that of the settings. Raises RequestError if they differ."""
    limits = {values[name] for name in ("max_tokens", "max_new_tokens") if name in values}
    if len(limits) > 1:
        raise RequestError("max_new_tokens", values["max_new_tokens"], f"max_tokens is {values['max_tokens']}", cure="Use one of them.")
    return limits.pop() if limits else settings.default_max_tokens or parameters.DEFAULT_MAX_TOKENS


def _sampling(values: dict[str, Any], service: Service, settings: ServerSettings, max_tokens: int) -> SamplingParams:
    """The sampling parameters of a legacy body. `values` are its checked fields."""
    params: dict[str, Any] = {param: values[name] for name, param in _DIRECT.items() if name in values}
    params |= _token_choice(values)
    stops = (*values.get("stop_words_list", ()), *values.get("stop", ()))
    params["stop"] = tuple(dict.fromkeys(word for word in stops if word))
    params["bad_words"] = bad_word_ids("bad_words_list", [word for word in values.get("bad_words_list", ()) if word], service)
    return SamplingParams(max_tokens=max_tokens, skip_special_tokens=settings.skip_special_tokens, **params)


def _token_choice(values: dict[str, Any]) -> dict[str, Any]:
    """temperature, top_k and top_p. Decoding is greedy if none of them is set, and for beam search."""
    if values.get("beam_width", 1) > 1 or not any(name in values for name in _SAMPLED):
        return {"temperature": 0.0}
    return {
        "temperature": values.get("temperature", 1.0),
        "top_k": max(0, values.get("top_k", 0)),
        "top_p": values.get("top_p") or 1.0,
    }
