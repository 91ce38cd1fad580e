"""The table of fields in a legacy request body, the format of the first Truss releases. `docs/truss.md` shows this table."""

from __future__ import annotations

from stoker.base.fields.table import ANYTHING, FieldTable, accepted, no_effect
from stoker.base.fields.values import Flag, ListOf, MappingOf, Real, Text, Whole
from stoker.base.types import MAX_STOP_CHARS, MAX_STOP_STRINGS

DEFAULT_MAX_TOKENS = 50  # as in the documentation of the first Truss releases
MAX_TOKENS = 1 << 24
MAX_WORDS = 1024
MAX_MESSAGES = 4096

_FLAG = Flag()
_SEED = Whole(-(2**63), 2**64 - 1)
_WORDS = ListOf(Text(MAX_STOP_CHARS), MAX_WORDS, or_one=True)
_STOP_WORDS = ListOf(Text(MAX_STOP_CHARS), MAX_STOP_STRINGS, or_one=True)

TABLE = FieldTable(
    [
        accepted("prompt", Text(), "the text to continue; exclusive with messages"),
        accepted("messages", ListOf(MappingOf(), MAX_MESSAGES), "a conversation, for the model's chat template"),
        accepted(
            "max_tokens",
            Whole(1, MAX_TOKENS),
            "maximum number of new tokens; of prompt and answer together where model_metadata names the engine; default 50",
        ),
        accepted("max_new_tokens", Whole(1, MAX_TOKENS), "maximum number of new tokens, in every Truss"),
        accepted("beam_width", Whole(1, 64), "beams, up to the engine's max_beam_width; the best is sent at once; default 1", "beam_width"),
        accepted("bad_words_list", _WORDS, "words that are never generated, alone or after a space; empty ones are ignored; default []"),
        accepted("stop_words_list", _STOP_WORDS, "words that end the answer and are not part of it; empty ones are ignored; default []"),
        accepted("stop", _STOP_WORDS, "the same as stop_words_list; both may be given"),
        accepted("repetition_penalty", Real(0.01, 100), "values above 1 discourage repeated tokens; default 1.0", "repetition_penalty"),
        accepted("ignore_eos", _FLAG, "the model's end token does not end the answer; default false", "ignore_eos"),
        accepted("stream", _FLAG, 'true: plain text as it is generated; false: {"text": …}; default true'),
        accepted("temperature", Real(0, 100), "0 is greedy; default: 1 if top_k or top_p is given, otherwise greedy"),
        accepted("top_k", Whole(-1, MAX_TOKENS), "sample from the k most likely tokens; 0 and -1 disable it"),
        accepted("top_p", Real(0, 1), "sample from the most likely tokens with this total probability; 0 and 1 disable it"),
        accepted("min_p", Real(0, 1), "drop tokens below this fraction of the highest probability; default 0", "min_p"),
        accepted("presence_penalty", Real(-100, 100), "subtracted once for each token that was generated; default 0", "presence_penalty"),
        accepted("frequency_penalty", Real(-100, 100), "subtracted each time a token was generated; default 0", "frequency_penalty"),
        accepted("random_seed", _SEED, "equal seeds give equal tokens; default: random", "seed"),
        accepted("seed", _SEED, "the same as random_seed", "seed"),
        accepted("min_length", Whole(0, MAX_TOKENS), "new tokens before the answer may end; default 0", "min_tokens"),
        accepted("length_penalty", Real(-100, 100), "beam search: score ÷ length ** length_penalty; default 1", "length_penalty"),
        accepted("early_stopping", _FLAG, "beam search: end when enough candidates have ended; default false", "early_stopping"),
        no_effect("model", Text(512), "the path names the model"),
        no_effect("eos_token_id", ANYTHING, "the model's own end token applies, as in Truss"),
        no_effect("request_id", ANYTHING, "the header X-Request-Id names the request"),
    ]
)
