"""Checks a request against the limits of the engine before it is queued. Errors contain the value and the limit."""

from __future__ import annotations

import math

import msgspec

from stoker.base.config import RequestLimits
from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.runtime.client import ExecutorInfo

MAX_REQUEST_ID_CHARS = 256


def lower_limits(info: ExecutorInfo, limits: RequestLimits) -> ExecutorInfo:
    """A copy of `info` in which the limits of requests are lowered to `limits`."""
    lowered = limits.lower(info.limits)
    return msgspec.structs.replace(info, limits=lowered, max_seq_len=min(info.max_seq_len, lowered.max_seq_len))


def check_request(request: GenerationRequest, info: ExecutorInfo) -> None:
    """Check the fields of a request that need no token ids. Raises RequestError."""
    if not isinstance(request.request_id, str) or not 0 < len(request.request_id) <= MAX_REQUEST_ID_CHARS:
        raise RequestError("request_id", request.request_id, f"it must be a string of 1 to {MAX_REQUEST_ID_CHARS} characters")
    if request.timeout_s is not None and not (0 < request.timeout_s < math.inf):
        raise RequestError("timeout_s", request.timeout_s, "it must be a positive number of seconds")
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens < 1:
        raise RequestError("truncate_prompt_tokens", request.truncate_prompt_tokens, "it must be at least 1")
    if request.draft_tokens is not None and request.draft_tokens < 0:
        raise RequestError("draft_tokens", request.draft_tokens, "it must be at least 0")
    if isinstance(request.prediction, list):
        check_ids("prediction", request.prediction, info.vocab_size)
    if request.draft_logits:
        count = len(request.prediction) if isinstance(request.prediction, list) else 0
        if len(request.draft_logits) != 4 * count * info.vocab_size:
            limit = f"there are {count} draft tokens and {info.vocab_size} tokens in the vocabulary"
            raise RequestError("draft_logits", f"{len(request.draft_logits) // 4} values", limit, cure="Send a row for each draft token.")
    check_params(request.params, info)


def check_params(params: SamplingParams, info: ExecutorInfo) -> None:
    """Raise RequestError for sampling parameters above the limits of the engine. SamplingParams has checked their ranges itself."""
    limits = info.limits
    if params.max_tokens > limits.max_output_len:
        raise RequestError(
            "max_tokens", params.max_tokens, f"the engine's max_output_len is {limits.max_output_len}", cure="Request fewer tokens."
        )
    if params.beam_width > 1 and info.speculate != "none":
        limit = f"beam search does not verify draft tokens, and this server runs with --speculate {info.speculate}"
        raise RequestError("beam_width", params.beam_width, limit, cure="Request one beam, or serve without --speculate.")
    if params.beam_width > limits.max_beam_width:
        cure = f"Build it with --max-beam-width {params.beam_width}, or request fewer beams."
        raise RequestError("beam_width", params.beam_width, f"the engine's max_beam_width is {limits.max_beam_width}", cure=cure)
    if not all(params.bad_words):
        raise RequestError("bad_words", [], "a bad word must have at least one token")
    for field, token_ids in params.token_ids_by_field.items():
        check_ids(field, token_ids, info.vocab_size)


def check_prompt(prompt_ids: list[int], params: SamplingParams, info: ExecutorInfo) -> None:
    """Check the length of the prompt and the range of its ids. Raises RequestError with prompt length, max_tokens and limit."""
    size, max_tokens = len(prompt_ids), params.max_tokens
    if not size:
        raise RequestError("prompt", prompt_ids, "it is empty", cure="Send at least one token.")
    if size > info.limits.max_input_len:
        limit = f"it has {size} tokens and the engine's max_input_len is {info.limits.max_input_len}"
        raise RequestError("prompt", prompt_ids, limit, cure="Shorten it, or set truncate_prompt_tokens.")
    if size + max_tokens > info.max_seq_len:
        limit = f"its {size} tokens and max_tokens={max_tokens} make {size + max_tokens}, and the limit of a sequence is {info.max_seq_len}"
        room = info.max_seq_len - size
        cure = f"Shorten it, or set max_tokens to at most {room}." if room > 0 else "Shorten it."
        raise RequestError("prompt", prompt_ids, limit, cure=cure)
    check_ids("prompt", prompt_ids, info.vocab_size)


def check_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Raise RequestError unless each id is a whole number in [0, vocab_size)."""
    if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token for token in token_ids if type(token) is not int or not 0 <= token < vocab_size)
    raise RequestError(field, wrong, f"a token id is a whole number from 0 to {vocab_size - 1}")
