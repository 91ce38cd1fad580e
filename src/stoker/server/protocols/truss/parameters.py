"""Every field of the first Trusses' body: what becomes of it here. docs/truss.md shows this table."""

from __future__ import annotations

from typing import Any

from stoker.base.types import MAX_STOP_CHARS, MAX_STOP_STRINGS
from stoker.server.protocols.field_table import Row, checked
from stoker.server.protocols.openai import kinds

MAX_TOKENS = 50  # the first document's default
LARGE = 1 << 24
MAX_WORDS = 1024
MAX_MESSAGES = 4096


def _sets(name: str, kind: kinds.Kind, says: str, param: str = "") -> Row:
    return Row(name=name, kind=kind, says=says, param=param)


def _idle(name: str, kind: kinds.Kind, says: str) -> Row:
    return Row(name=name, kind=kind, says=says, fate="no effect")


_WORDS = kinds.one_or_list_of(kinds.text(MAX_STOP_CHARS), MAX_WORDS)
_STOPS = kinds.one_or_list_of(kinds.text(MAX_STOP_CHARS), MAX_STOP_STRINGS)

TABLE = (
    _sets("prompt", kinds.text(), "the text to continue; it or messages"),
    _sets("messages", kinds.list_of(kinds.mapping, MAX_MESSAGES), "a conversation, for the model's chat template"),
    _sets("max_tokens", kinds.whole(1, LARGE), "new tokens at most; prompt and answer together where model_metadata names the engine; 50"),
    _sets("max_new_tokens", kinds.whole(1, LARGE), "new tokens at most, whatever the Truss"),
    _sets("beam_width", kinds.whole(1, 64), "beams, at most the engine's max_beam_width; the best comes in one piece; 1", "beam_width"),
    _sets("bad_words_list", _WORDS, "words that are never written, also after a space; empty ones ask for nothing; []"),
    _sets("stop_words_list", _STOPS, "words that end the answer and are not part of it; empty ones ask for nothing; []"),
    _sets("stop", _STOPS, "the same as stop_words_list; both may be given"),
    _sets("repetition_penalty", kinds.number(0.01, 100), "above 1 discourages tokens that were there; 1.0", "repetition_penalty"),
    _sets("ignore_eos", kinds.boolean, "the model's end token does not end the answer; false", "ignore_eos"),
    _sets("stream", kinds.boolean, 'plain text as it comes; false: {"text": …}; true'),
    _sets("temperature", kinds.number(0, 100), "0 is greedy; 1 where only top_k or top_p is given; without the three: greedy"),
    _sets("top_k", kinds.whole(-1, LARGE), "sample from the k best tokens; 0 and -1 are off"),
    _sets("top_p", kinds.number(0, 1), "sample from the best tokens of this probability; 0 and 1 are off"),
    _sets("min_p", kinds.number(0, 1), "drop tokens below this fraction of the best one's probability; 0", "min_p"),
    _sets("presence_penalty", kinds.number(-100, 100), "subtracted once for each token that was generated; 0", "presence_penalty"),
    _sets("frequency_penalty", kinds.number(-100, 100), "subtracted each time a token was generated; 0", "frequency_penalty"),
    _sets("random_seed", kinds.whole(-(2**63), 2**64 - 1), "the same seed gives the same tokens; random", "seed"),
    _sets("seed", kinds.whole(-(2**63), 2**64 - 1), "the same as random_seed", "seed"),
    _sets("min_length", kinds.whole(0, LARGE), "new tokens before an end may come; 0", "min_tokens"),
    _sets("length_penalty", kinds.number(-100, 100), "beams: score ÷ length ** length_penalty; 1", "length_penalty"),
    _sets("early_stopping", kinds.boolean, "beams: end when enough candidates ended; false", "early_stopping"),
    _idle("model", kinds.text(512), "the path names the model"),
    _idle("request_id", kinds.anything, "X-Request-Id names the request"),
)
_BY_NAME = {row.name: row for row in TABLE}


def check(body: dict[str, Any]) -> dict[str, Any]:
    """The honoured fields with their checked values; null counts as absent. Raises RequestError with the nearest name."""
    return checked(body, _BY_NAME)
