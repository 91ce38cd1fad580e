"""A completions request, checked and converted to one GenerationRequest per prompt."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest
from stoker.frontend.prompts import encode_prompt, truncate_prompt
from stoker.frontend.service import Service
from stoker.server.protocol import Context
from stoker.server.protocols.openai.call import OpenAICall, read_openai_call
from stoker.server.protocols.openai.prompts import read_prompts
from stoker.server.threads import LONG_TOKENS, compute

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionCall(msgspec.Struct):
    """A checked request. `requests` and `echoes` have one entry per prompt; an echo is the text that precedes the answer."""

    common: OpenAICall
    service: Service
    requests: list[GenerationRequest]
    echoes: list[str]
    num_choices: int  # per prompt, in the response; best_of may generate more
    score_only: bool  # max_tokens=0: the one generated token is dropped
    head: dict[str, Any]  # members that every response object starts with

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are requested."""
        return "logprobs" in self.common.values

    def rename(self, error: Exception, index: int) -> Exception:
        """The error of the prompt with this index. If there are several, the name of the prompt has the index."""
        if not isinstance(error, RequestError) or error.field not in ("prompt", "prompt_ids") or len(self.requests) == 1:
            return error
        is_id = isinstance(error.value, int)
        return RequestError(f"prompt[{index}]", error.value if is_id else self.common.values["prompt"][index], error.limit, cure=error.cure)


async def read_completion_call(body: dict[str, Any], service: Service, context: Context) -> CompletionCall:
    """Check a request body. Raises RequestError."""
    default = context.settings.default_max_tokens or DEFAULT_MAX_TOKENS
    echo = body.get("echo") is True
    score_only = _scores_only(body, echo)
    checked = {**body, "max_tokens": 1} if score_only else body
    common = read_openai_call("completions", checked, service, context.settings, max_tokens=default)
    values = common.values
    num_choices = common.params.n
    if params := _params(values, num_choices, echo):
        common.params = msgspec.structs.replace(common.params, **params)
    if common.params.n != num_choices and common.stream:
        raise RequestError("best_of", values["best_of"], "with stream=true it must equal n")
    if "prompt" not in values:
        raise RequestError("prompt", None, "it is missing")
    truncated = "truncate_prompt_tokens" in values
    prompts = await read_prompts(values["prompt"], service.max_seq_len, truncated=truncated)
    requests = [common.generation(prompt, i if len(prompts) > 1 else None) for i, prompt in enumerate(prompts)]
    echoes = [await _echo(service, request) if echo or common.token_ids else "" for request in requests]
    echoes = echoes if echo else [""] * len(requests)
    head = {"id": f"cmpl-{common.request_id}", "object": "text_completion", "created": int(time.time()), "model": service.model_name}
    return CompletionCall(common, service, requests, echoes, num_choices, score_only, head)


def _scores_only(body: dict[str, Any], echo: bool) -> bool:
    """Whether max_tokens=0 requests only the log-probabilities of the prompt. The executor then generates one token, which is dropped."""
    return echo and type(body.get("max_tokens")) is int and body["max_tokens"] == 0


def _params(values: dict[str, Any], n: int, echo: bool) -> dict[str, Any]:
    """SamplingParams fields that logprobs, best_of and echo determine."""
    params: dict[str, Any] = {"logprobs": values["logprobs"]} if "logprobs" in values else {}
    best_of = values.get("best_of", n)
    if best_of < n:
        raise RequestError("best_of", best_of, f"it must be at least n={n}")
    if best_of > n and not values.get("use_beam_search"):
        params |= {"n": best_of, "logprobs": values.get("logprobs", 0)}
    if echo and "logprobs" in values:
        params["prompt_logprobs"] = max(values["logprobs"], values.get("prompt_logprobs", 0))
    return params


async def _echo(service: Service, request: GenerationRequest) -> str:
    """The text of the prompt after truncation. Replaces the prompt of `request` by its token ids."""
    text = request.prompt if isinstance(request.prompt, str) else None
    ids = await encode_prompt(service, text, add_special_tokens=request.add_special_tokens) if text is not None else request.prompt
    assert isinstance(ids, list)
    request.prompt = truncate_prompt(ids, request.truncate_prompt_tokens, request.truncation_side)
    truncated = len(request.prompt) < len(ids)
    if text is not None and not truncated:
        return text
    decode = partial(service.decode, request.prompt, skip_special_tokens=False)
    return await compute(decode, long=len(request.prompt) > LONG_TOKENS)
