"""What a request is, and what comes back: the plain data every layer above the kernels speaks."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from stoker.base.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_CHOICES = 64


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the engine's limit
    CANCELLED = "cancelled"  # the client gave up, or the operator did
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the sequence failed; others are untouched


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a sequence ends. Checked on construction; raises RequestError.

    Defaults are greedy decoding of 16 tokens, as in OpenAI's completions except for the temperature.
    """

    max_tokens: int = 16  # new tokens, at most
    min_tokens: int = 0  # new tokens before an end id, stop id or stop string may end the sequence
    n: int = 1  # independent sequences for the prompt
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # in (0, 1]; 1 is off
    min_p: float = 0.0  # tokens below min_p × the best probability are dropped
    seed: int | None = None  # same seed, same tokens, whatever else is in the batch
    repetition_penalty: float = 1.0  # > 1 discourages tokens of the prompt and the output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # subtracted once for each token that was generated
    frequency_penalty: float = 0.0  # subtracted for each time a token was generated
    logit_bias: dict[int, float] = {}  # added to the logits of these token ids
    stop: tuple[str, ...] = ()  # strings that end the sequence; never part of the text unless include_stop
    stop_token_ids: tuple[int, ...] = ()  # ids that end the sequence
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that are never completed
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False  # the model's own end ids don't end the sequence
    skip_special_tokens: bool = True  # special tokens make no text
    logprobs: int | None = None  # None: none; k ≥ 0: the chosen token's and the k best
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    beam_width: int = 1  # > 1 is beam search; refused by engines built with a smaller max_beam_width
    length_penalty: float = 1.0  # beam search: score ÷ length ** length_penalty
    early_stopping: bool = False  # beam search: stop when beam_width candidates ended
    guide: Guide | None = None  # the text must match a grammar

    def __post_init__(self) -> None:
        if self.guide is not None:
            self.guide.check()
        _whole(self, "max_tokens", 1)
        _whole(self, "min_tokens", 0, self.max_tokens)
        _whole(self, "n", 1, MAX_CHOICES)
        _number(self, "temperature", 0.0, 100.0)
        _whole(self, "top_k", 0)
        _number(self, "top_p", 0.0, 1.0, above=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, 100.0, above=True)
        _number(self, "presence_penalty", -100.0, 100.0)
        _number(self, "frequency_penalty", -100.0, 100.0)
        _number(self, "length_penalty", -100.0, 100.0)
        _whole(self, "beam_width", 1, 64)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError("seed", self.seed, "it must fit 64 bits")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(self, name, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", list(self.stop), f"at most {MAX_STOP_STRINGS} stop strings")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError("stop", text, f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        for bias in self.logit_bias.values():
            if math.isnan(bias) or abs(bias) == math.inf:
                raise RequestError("logit_bias", bias, "it must be a finite number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


class Guide(msgspec.Struct, frozen=True):
    """A grammar that the generated text must match."""

    kind: str  # json (any JSON), json_schema, regex, grammar (EBNF), choice (JSON list of strings)
    text: str = ""  # the schema, expression or grammar

    KINDS = ("json", "json_schema", "regex", "grammar", "choice", "structural_tag")

    def check(self) -> None:
        if self.kind not in self.KINDS:
            raise RequestError("guide.kind", self.kind, f"it must be one of {', '.join(self.KINDS)}")
        if len(self.text) > 1 << 20:
            raise RequestError("guide.text", self.text, "at most 1 MiB of grammar")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: of the token itself and of the best ones, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct):
    """Tokens counted for one request, over all its sequences."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused from the prefix index


class Delta(msgspec.Struct):
    """New tokens and text of one sequence since the last emission. Joined deltas are the whole answer."""

    index: int  # which of the request's n sequences (or beams)
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None  # set in a sequence's last delta, and only there
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    usage: Usage | None = None  # set in the request's first delta (prompt side) and last delta (all)
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # in the first delta, when requested
    error: str | None = None  # the message when finish_reason is ERROR


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One client call, as every protocol hands it to the generation service."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams
    add_special_tokens: bool = True  # when the prompt is text
    priority: int = 0  # lower is sooner
    timeout_s: float | None = None  # deadline, counted from arrival
    cache_salt: str = ""  # requests share prefixes only with equal salts
    truncate_prompt_tokens: int | None = None  # keep only this number of prompt tokens, the last ones


def _whole(params: Any, name: str, low: int, high: int | None = None) -> None:
    value = getattr(params, name)
    if type(value) is not int:
        raise RequestError(name, value, "it must be a whole number")
    if value < low or (high is not None and value > high):
        raise RequestError(name, value, f"it must be between {low} and {high}" if high is not None else f"it must be at least {low}")


def _number(params: Any, name: str, low: float, high: float, *, above: bool = False) -> None:
    value = getattr(params, name)
    if type(value) not in (int, float) or math.isnan(value):
        raise RequestError(name, value, "it must be a finite number")
    if not (low < value if above else low <= value) or value > high:
        raise RequestError(name, value, f"it must be {'above' if above else 'at least'} {low:g} and at most {high:g}")
