"""Every member of "parameters": what becomes of it here. docs/sagemaker.md shows this table."""

from __future__ import annotations

from typing import Any

from stoker.base.types import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from stoker.server.protocols.field_table import Row, checked
from stoker.server.protocols.openai import kinds

FORMATTERS = ("json", "jsonlines", "sse", "3p", "3p_stream")
LARGE = 1 << 24
MAX_WORDS = 1024


def _sets(name: str, kind: kinds.Kind, says: str, param: str = "") -> Row:
    return Row(name=name, kind=kind, says=says, param=param)


def _idle(name: str, kind: kinds.Kind, says: str) -> Row:
    return Row(name=name, kind=kind, says=says, fate="no effect")


def _refused(name: str, says: str, *harmless: Any) -> Row:
    return Row(name=name, says=says, fate="refused", harmless=harmless)


_STRINGS = kinds.one_or_list_of(kinds.text(MAX_STOP_CHARS), MAX_STOP_STRINGS)
_WORDS = kinds.one_or_list_of(kinds.text(MAX_STOP_CHARS), MAX_WORDS)

TABLE = (
    _sets("max_new_tokens", kinds.whole(1, LARGE), "new tokens at most; 30", "max_tokens"),
    _sets("min_length", kinds.whole(0, LARGE), "new tokens before an end may come; 1", "min_tokens"),
    _sets("min_new_tokens", kinds.whole(0, LARGE), "the same as min_length", "min_tokens"),
    _sets("do_sample", kinds.boolean, "true: temperature 0.8, top_k 5, top_p 0.85 where unset; false: greedy; unset: if one is set"),
    _sets("temperature", kinds.number(0, 100), "1 where only top_k or top_p is set; 0 is greedy"),
    _sets("top_k", kinds.whole(-1, LARGE), "0 and -1 are off"),
    _sets("top_p", kinds.number(0, 1), "0 and 1 are off"),
    _sets("min_p", kinds.number(0, 1), "0 is off", "min_p"),
    _sets("repetition_penalty", kinds.number(0.01, 100), "1", "repetition_penalty"),
    _sets("presence_penalty", kinds.number(-100, 100), "0", "presence_penalty"),
    _sets("frequency_penalty", kinds.number(-100, 100), "0", "frequency_penalty"),
    _sets("num_beams", kinds.whole(1, 64), "beams of a search, at most the engine's max_beam_width; not with stream; 1", "beam_width"),
    _sets("length_penalty", kinds.number(-100, 100), "beams: score ÷ length ** length_penalty; 1", "length_penalty"),
    _sets("early_stopping", kinds.boolean, "beams: end when enough candidates ended; false", "early_stopping"),
    _sets("seed", kinds.whole(-(2**63), 2**64 - 1), "the same seed gives the same tokens; random", "seed"),
    _sets("stop", _STRINGS, "strings that end the answer; they are not part of it"),
    _sets("stop_sequences", _STRINGS, "the same as stop; both may be given"),
    _sets("stop_token_ids", kinds.list_of(kinds.whole(0, 1 << 31), MAX_WORDS), "ids that end the answer", "stop_token_ids"),
    _sets("bad_sequences", _WORDS, "strings that are never written, also after a space"),
    _sets("ignore_eos_token", kinds.boolean, "the model's end token does not end the answer; false", "ignore_eos"),
    _sets("ignore_eos", kinds.boolean, "the same as ignore_eos_token", "ignore_eos"),
    _sets("skip_special_tokens", kinds.boolean, "special tokens make no text; true", "skip_special_tokens"),
    _sets("add_special_tokens", kinds.boolean, "the tokenizer's own prefix before the prompt; true"),
    _sets("truncate", kinds.whole(1, LARGE), "keeps the last so many prompt tokens"),
    _sets("n", kinds.whole(1, MAX_CHOICES), "answers; those after the first are details.best_of_sequences; not with stream; 1"),
    _sets("best_of", kinds.whole(1, MAX_CHOICES), "generates so many and answers with the n most probable a token; not with stream; n"),
    _sets("return_full_text", kinds.boolean, "the prompt before the answer; false. The 0.26 dialect leaves it out, as there"),
    _sets("details", kinds.boolean, "tokens, counts and the reason of the end; false, true with tgi_compat"),
    _sets("decoder_input_details", kinds.boolean, "details.prefill: the prompt's tokens; needs details; false"),
    _sets("top_n_tokens", kinds.whole(0, MAX_LOGPROBS), "details.top_tokens: the so many likeliest at each place; needs details; 0"),
    _sets("output_formatter", kinds.one_of(*FORMATTERS), f"one of {', '.join(FORMATTERS)}; those that stream do so without stream"),
    _sets("guided_json", kinds.anything, "a JSON schema, as an object or text"),
    _sets("guided_regex", kinds.text(1 << 20), "a regular expression"),
    _sets("guided_choice", kinds.list_of(kinds.text(1 << 16), MAX_WORDS), "a list of strings"),
    _sets("guided_grammar", kinds.text(1 << 20), "a grammar in EBNF"),
    _sets("request_timeout", kinds.number(0.001, 86400), "seconds; the answer so far ends with finish_reason length"),
    _idle("stream", kinds.boolean, "stream stands beside inputs; in here it has no effect, as there"),
    _idle("streaming", kinds.boolean, "the same as stream"),
    _idle("logprobs", kinds.anything, "every token of details and of a stream has its log-probability"),
    _idle("guided_decoding_backend", kinds.text(64), "xgrammar compiles every grammar"),
    _idle("spaces_between_special_tokens", kinds.boolean, "no space is added or taken away around special tokens"),
    _refused("typical_p", "typical sampling is not done", 1, 1.0, 0),
    _refused("watermark", "text is not watermarked", False),
    _refused("use_beam_search", "use num_beams", False),
    _refused("adapters", "there are no adapters", ""),
    _refused("logits_processors", "code of clients is not run"),
)  # fmt: skip
_BY_NAME = {row.name: row for row in TABLE}


def check(parameters: dict[str, Any]) -> dict[str, Any]:
    """The honoured members with their checked values; null counts as absent. Raises RequestError with the nearest name."""
    return checked(parameters, _BY_NAME, inside="parameters.", noun="parameter")
