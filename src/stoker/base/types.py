"""Requests, sampling parameters and results: the plain data that is common to all layers above the kernels."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from stoker.base.errors import RequestError, RequestTypeError
from stoker.base.param_checks import check_lists, check_number, check_numbers_by_token, check_type, check_whole_number

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_CHOICES = 64
MAX_ALLOWED_TOKENS = 1 << 14  # of allowed_token_ids: their logits are gathered in each step
# Fields of SamplingParams that change logits.
CHANGE_LOGITS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "guide")
FLAGS = ("early_stopping", "ignore_eos", "include_stop", "skip_special_tokens")  # fields of SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""

    LENGTH = "length"
    """`max_tokens`, or the longest sequence of the engine, was reached."""

    CANCELLED = "cancelled"
    """The client disconnected or cancelled, or the server was stopped."""

    DEADLINE = "deadline"
    """The deadline of the request (`timeout_s`) passed."""

    ERROR = "error"
    """The sequence failed. Other sequences are not affected."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen, and when a sequence ends.

    Construction raises RequestError for a value that is out of range. For a value of another type, the error is a TypeError, too.
    Defaults are greedy decoding of 16 tokens, as in OpenAI's completions except for the temperature.

    Attributes:
        max_tokens: Largest number of new tokens, at least 1.
        min_tokens: Number of new tokens before an end id, stop id or stop string may end the sequence.
        n: Number of independent sequences for the prompt, 1 to 64.
        temperature: 0 to 100. 0 selects the token of the largest logit (greedy).
        top_k: Draw from the `top_k` tokens of the largest logits. 0: no limit.
        top_p: Draw from the smallest set of tokens whose probabilities sum to `top_p`, in (0, 1]. 1: no limit.
        min_p: Tokens of less than `min_p` × the largest probability are excluded.
        seed: The same seed gives the same tokens, whatever else is in the batch. None: a random seed.
        repetition_penalty: 0.01 to 100. Values above 1 make tokens of the prompt and the output less likely (CTRL, arXiv 1909.05858).
        presence_penalty: Subtracted once from the logit of each token that was generated.
        frequency_penalty: Subtracted from the logit of a token for each time that it was generated.
        logit_bias: Token id → value that is added to its logit.
        allowed_token_ids: The only tokens that are generated, at most 16384. End ids end the sequence only if they are among them.
        stop: A string, or several, that end the sequence. The text does not contain them unless `include_stop` is set.
        stop_token_ids: Token ids that end the sequence.
        bad_words: Words that are never generated: a string, or a list of strings and of lists of token ids. A string is tokenized as
            written and after a space.
        include_stop: Whether the text contains the stop string.
        ignore_eos: Whether the model's end-of-sequence ids are treated as ordinary tokens.
        skip_special_tokens: Whether special tokens are left out of the text.
        logprobs: k: return the log-probabilities of the chosen token and of the k most likely ones. None: no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        beam_width: Above 1: beam search. An engine refuses more than its `max_beam_width`.
        length_penalty: Beam search: the score of a candidate is divided by length ** `length_penalty`.
        early_stopping: Beam search: whether to stop when `beam_width` candidates have ended.
        guide: A grammar that the text must match.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: str | Sequence[str | Sequence[int]] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.guide is not None:
            if not isinstance(self.guide, Guide):
                raise RequestTypeError("guide", self.guide, "it must be a Guide")
            self.guide.check()
        check_lists(self)
        check_whole_number(self, "max_tokens", 1)
        check_whole_number(self, "min_tokens", 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"it must be at most max_tokens={self.max_tokens}")
        check_whole_number(self, "n", 1, MAX_CHOICES)
        check_number(self, "temperature", 0.0, 100.0)
        check_whole_number(self, "top_k", 0)
        check_number(self, "top_p", 0.0, 1.0, above=True)
        check_number(self, "min_p", 0.0, 1.0)
        check_number(self, "repetition_penalty", 0.01, 100.0)
        check_number(self, "presence_penalty", -100.0, 100.0)
        check_number(self, "frequency_penalty", -100.0, 100.0)
        check_number(self, "length_penalty", -100.0, 100.0)
        check_whole_number(self, "beam_width", 1, 64)
        if self.seed is not None:
            check_type(self, "seed", int, "a whole number")
            if not -(2**63) <= self.seed < 2**64:
                raise RequestError("seed", self.seed, "it must fit 64 bits")
        for name in FLAGS:
            check_type(self, name, bool, "True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole_number(self, name, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", list(self.stop), f"at most {MAX_STOP_STRINGS} stop strings")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError("stop", text, f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        check_numbers_by_token(self, "logit_bias")
        if self.allowed_token_ids is not None and not 0 < len(self.allowed_token_ids) <= MAX_ALLOWED_TOKENS:
            limit = f"it must contain 1 to {MAX_ALLOWED_TOKENS} ids, and it contains {len(self.allowed_token_ids)}"
            raise RequestError("allowed_token_ids", list(self.allowed_token_ids[:8]), limit)

    @property
    def greedy(self) -> bool:
        """Whether each token is the one with the largest logit."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def changes_logits(self) -> list[str]:
        """The names of fields that are set and change logits, which beam search does not support."""
        return [name for name in CHANGE_LOGITS if getattr(self, name) != getattr(_NEUTRAL, name)]

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """`bad_words` as token ids. Only valid after the frontend has replaced strings by token ids."""
        return cast("tuple[tuple[int, ...], ...]", self.bad_words)

    @property
    def token_ids_by_field(self) -> dict[str, list[int]]:
        """The token ids in each field that contains some. Admission checks that they are in the engine's vocabulary."""
        bad_words = [token for word in self.bad_word_ids for token in word]
        allowed = [*(self.allowed_token_ids or ())]
        markers = [self.guide.reasoning_start, *self.guide.reasoning_end] if self.guide is not None else []
        return {
            "logit_bias": [*self.logit_bias],
            "allowed_token_ids": allowed,
            "stop_token_ids": [*self.stop_token_ids],
            "bad_words": bad_words,
            "guide": [token for token in markers if token is not None],
        }


class Guide(msgspec.Struct, frozen=True):
    """A grammar that the generated text must match."""

    kind: str
    """`json` (any JSON), `json_schema`, `regex`, `grammar` (EBNF), `choice` (a JSON list of strings) or `structural_tag`."""

    text: str = ""
    """The schema, regular expression or grammar."""

    reasoning_end: tuple[int, ...] = ()
    """The tokens that end the reasoning, which precedes the answer and is free text. The grammar constrains the tokens after them.
    Empty: there is no reasoning."""

    reasoning_start: int | None = None
    """The token that starts the reasoning: without it as the first token, there is none. None: the text starts inside the reasoning."""

    KINDS = ("json", "json_schema", "regex", "grammar", "choice", "structural_tag")

    def check(self) -> None:
        """Raise RequestError for an unknown kind or a text that is too long."""
        if self.kind not in self.KINDS:
            raise RequestError("guide.kind", self.kind, f"it must be one of {', '.join(self.KINDS)}")
        if not isinstance(self.text, str):
            raise RequestTypeError("guide.text", self.text, "it must be a string")
        if len(self.text) > 1 << 20:
            raise RequestError("guide.text", self.text, "at most 1 MiB of grammar")
        if type(self.reasoning_start) not in (int, type(None)):
            raise RequestTypeError("guide.reasoning_start", self.reasoning_start, "it must be a token id")
        if not isinstance(self.reasoning_end, tuple) or not all(type(token) is int for token in self.reasoning_end):
            raise RequestTypeError("guide.reasoning_end", self.reasoning_end, "it must be a tuple of token ids")
        if self.reasoning_start is not None and not self.reasoning_end:
            raise RequestError("guide.reasoning_start", self.reasoning_start, "it requires reasoning_end")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position."""

    token_id: int
    """The token at this position."""

    logprob: float
    """Its log-probability."""

    top: list[tuple[int, float]] = []
    """(token id, log-probability) of the most likely tokens, in descending order."""


class Usage(msgspec.Struct):
    """Tokens counted for one request, over all its sequences."""

    prompt_tokens: int = 0
    """Tokens of the prompt."""

    completion_tokens: int = 0
    """Generated tokens of all sequences."""

    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were reused."""

    draft_tokens: int = 0
    """Draft tokens that were verified."""

    accepted_draft_tokens: int = 0
    """Those of the draft tokens that are part of the answer."""


class Timings(msgspec.Struct, frozen=True):
    """When a request was computed. All times are in seconds; the clock starts when the request is submitted, before tokenization."""

    queue_s: float
    """Time that the first sequence waited in the executor before its prompt was computed."""

    time_to_first_token_s: float
    """Time until the first token arrived. Equal to `total_s` if there is no token."""

    total_s: float
    """Time until the last token arrived."""

    tokens_per_s: float
    """Generated tokens of all sequences divided by `total_s`."""

    time_per_output_token_s: float
    """Mean time between two tokens of a sequence, after the first one. 0 for fewer than two tokens."""

    prepare_s: float = 0.0
    """Time until the prompt was tokenized and sent to the executor."""

    detokenize_s: float = 0.0
    """Time spent on converting tokens to text. Measured only for requests that are traced."""

    def phases(self) -> dict[str, float]:
        """Seconds by phase: prepare, queue, prefill and decode follow each other. compute is prefill and decode; total is the sum."""
        prefill_s = max(0.0, self.time_to_first_token_s - self.prepare_s - self.queue_s)
        decode_s = self.total_s - self.time_to_first_token_s
        return {
            "prepare": self.prepare_s,
            "queue": self.queue_s,
            "prefill": prefill_s,
            "decode": decode_s,
            "compute": prefill_s + decode_s,
            "total": self.total_s,
        }


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    """The part of a prompt that one step computed. Times are of time.monotonic(), which all processes of a machine share."""

    started: float
    """When the step was launched."""

    ended: float
    """When its results arrived."""

    num_tokens: int
    """Number of computed tokens."""


class AdmissionRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a sequence waited for, and which KV cache blocks it received for its prompt, when it was first admitted."""

    queue_s: float
    """Seconds between the arrival in the executor and the admission."""

    num_reused_blocks: int
    """Blocks of earlier sequences whose keys and values were reused, on the device or loaded from the host."""

    num_allocated_blocks: int
    """Blocks that were allocated."""

    num_new_blocks: int
    """Those of the allocated blocks that had no reusable contents. The others evicted a cached prefix."""


class Delta(msgspec.Struct):
    """New tokens and text of one sequence since its previous delta. All deltas together are the whole answer."""

    index: int
    """Number of the sequence (or beam) among those of the request, from 0."""

    text: str = ""
    """New text. It ends with a whole character."""

    token_ids: list[int] = []
    """New token ids."""

    logprobs: list[TokenLogprobs] = []
    """One entry per new token, when requested."""

    finish_reason: FinishReason | None = None
    """Set in the last delta of a sequence, and only there."""

    stop_reason: int | str | None = None
    """The stop id or stop string that ended it."""

    usage: Usage | None = None
    """Set in the first delta of the request (prompt tokens only) and in the last one (all fields)."""

    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """In the first delta, when requested."""

    error: str | None = None
    """The message when finish_reason is ERROR."""

    timings: Timings | None = None
    """Set in the last delta of the request."""

    admission: AdmissionRecord | None = None
    """Set in the first delta of a sequence that has tokens."""

    draft_tokens: int = 0
    """Draft tokens of the sequence that were verified so far."""

    accepted_draft_tokens: int = 0
    """Those of the draft tokens that were accepted."""

    prefill_chunks: list[PrefillChunk] = []
    """In the first delta of a sequence of a traced request."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One client call, as every protocol hands it to the generation service."""

    request_id: str
    """Unique among the requests of a service."""

    prompt: str | list[int]
    """Text, or token ids."""

    params: SamplingParams
    """Sampling parameters."""

    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, if the prompt is text."""

    priority: int = 0
    """Requests with a lower number are admitted first."""

    timeout_s: float | None = None
    """Deadline in seconds after arrival."""

    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt."""

    prediction: str | list[int] = ""
    """What the answer is expected to contain: text, or token ids. A server with speculative decoding verifies it as a draft."""

    draft_logits: bytes = b""
    """The float32 logits [tokens, vocabulary] from which the token ids of `prediction` were sampled. Empty: unknown."""

    draft_tokens: int | None = None
    """Largest number of draft tokens per step, if lower than that of the server. 0: none."""

    truncate_prompt_tokens: int | None = None
    """Use only this number of prompt tokens: the last ones, or the first ones with truncation_side="right"."""

    truncation_side: Literal["left", "right"] = "left"
    """The side on which `truncate_prompt_tokens` removes tokens."""

    traced: bool = False
    """Whether the times of prefill chunks and of detokenization are measured."""


_NEUTRAL = SamplingParams()
