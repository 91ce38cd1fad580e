"""The first Trusses' body: checked, its prompt tokenized, as a GenerationRequest."""

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

_DIRECT = parameters.TABLE.targets()
_SAMPLED = ("temperature", "top_k", "top_p")


class Asked(msgspec.Struct, kw_only=True):
    """A checked request; `text` is the whole answer where max_tokens leaves no room for new ones, and then there is no `request`."""

    stream: bool
    request: GenerationRequest | None = None
    text: str = ""


async def read(body: dict[str, Any], service: Service, settings: ServerSettings, options: TrussOptions) -> Asked:
    """Raises RequestError that names the field."""
    values = parameters.TABLE.check(body)
    ids = await _prompt(values, service, settings)
    stream, max_tokens = values.get("stream", True), _max_tokens(values, settings)
    if options.max_tokens_counts_prompt and "max_new_tokens" not in values:
        if max_tokens <= len(ids):
            return Asked(stream=stream, text=service.decode(ids[:max_tokens]))
        max_tokens -= len(ids)
    params = _sampling(values, service, settings, max_tokens)
    request = GenerationRequest(request_id=uuid.uuid4().hex, prompt=ids, params=params, timeout_s=settings.request_timeout_s)
    return Asked(stream=stream, request=request)


async def _prompt(values: dict[str, Any], service: Service, settings: ServerSettings) -> list[int]:
    if "prompt" in values and "messages" in values:
        raise RequestError("messages", "…", "a prompt is given too", cure="Send one of them.")
    if "messages" in values:
        return await encode_prompt(service, service.render_chat(list(values["messages"])), add_special_tokens=False)
    if "prompt" not in values:
        raise RequestError("prompt", None, "it is missing")
    return await encode_prompt(service, values["prompt"], add_special_tokens=settings.add_special_tokens)


def _max_tokens(values: dict[str, Any], settings: ServerSettings) -> int:
    given = {values[name] for name in ("max_tokens", "max_new_tokens") if name in values}
    if len(given) > 1:
        raise RequestError("max_new_tokens", values["max_new_tokens"], f"max_tokens is {values['max_tokens']}", cure="Use one of them.")
    return given.pop() if given else settings.default_max_tokens or parameters.DEFAULT_MAX_TOKENS


def _sampling(values: dict[str, Any], service: Service, settings: ServerSettings, max_tokens: int) -> SamplingParams:
    given: dict[str, Any] = {param: values[name] for name, param in _DIRECT.items() if name in values}
    given |= _choosing(values)
    stops = (*values.get("stop_words_list", ()), *values.get("stop", ()))
    given["stop"] = tuple(dict.fromkeys(word for word in stops if word))
    given["bad_words"] = bad_word_ids("bad_words_list", [word for word in values.get("bad_words_list", ()) if word], service)
    return SamplingParams(max_tokens=max_tokens, skip_special_tokens=settings.skip_special_tokens, **given)


def _choosing(values: dict[str, Any]) -> dict[str, Any]:
    """Greedy unless one of the three is given, and for beams."""
    if values.get("beam_width", 1) > 1 or not any(name in values for name in _SAMPLED):
        return {"temperature": 0.0}
    return {
        "temperature": values.get("temperature", 1.0), "top_k": max(0, values.get("top_k", 0)), "top_p": values.get("top_p") or 1.0,
    }  # fmt: skip
