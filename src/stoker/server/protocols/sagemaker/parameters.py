"""The table of fields in the "parameters" of an /invocations body. `docs/sagemaker.md` shows this table."""

from __future__ import annotations

from stoker.base.fields.table import ANYTHING, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Flag, ListOf, Real, Text, Whole, exactly
from stoker.base.types import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from stoker.server.protocols.common.guides import CHOICE_LIST

FORMATTERS = ("json", "jsonlines", "sse", "3p", "3p_stream")
MAX_TOKENS = 1 << 24
MAX_ITEMS = 1024
MAX_GRAMMAR_CHARS = 1 << 20

_FLAG = Flag()
_TOKEN_COUNT = Whole(0, MAX_TOKENS)
_STOP_STRINGS = ListOf(Text(MAX_STOP_CHARS), MAX_STOP_STRINGS, or_one=True)
_WORDS = ListOf(Text(MAX_STOP_CHARS), MAX_ITEMS, or_one=True)
_GRAMMAR = Text(MAX_GRAMMAR_CHARS)

TABLE = FieldTable(
    [
        accepted("max_new_tokens", Whole(1, MAX_TOKENS), "maximum number of new tokens; default 30", "max_tokens"),
        accepted("min_length", _TOKEN_COUNT, "tokens before the answer may end; default 0", "min_tokens"),
        accepted("min_new_tokens", _TOKEN_COUNT, "the same as min_length", "min_tokens"),
        accepted(
            "do_sample",
            _FLAG,
            "true: unset values are temperature 0.8, top_k 5, top_p 0.85; false: greedy; default: true if one of the three is set",
        ),
        accepted("temperature", Real(0, 100), "0 is greedy; default 1 where only top_k or top_p is set"),
        accepted("top_k", Whole(-1, MAX_TOKENS), "0 and -1 disable it"),
        accepted("top_p", Real(0, 1), "0 and 1 disable it"),
        accepted("min_p", Real(0, 1), "0 disables it", "min_p"),
        accepted("repetition_penalty", Real(0.01, 100), "default 1", "repetition_penalty"),
        accepted("presence_penalty", Real(-100, 100), "default 0", "presence_penalty"),
        accepted("frequency_penalty", Real(-100, 100), "default 0", "frequency_penalty"),
        accepted("num_beams", Whole(1, 64), "beam search, up to the engine's max_beam_width; not with stream; default 1", "beam_width"),
        accepted("length_penalty", Real(-100, 100), "beam search: score ÷ length ** length_penalty; default 1", "length_penalty"),
        accepted("early_stopping", _FLAG, "beam search: end when enough candidates have ended; default false", "early_stopping"),
        accepted("seed", Whole(-(2**63), 2**64 - 1), "equal seeds give equal tokens; default: random", "seed"),
        accepted("stop", _STOP_STRINGS, "strings that end the answer and are not part of it"),
        accepted("stop_sequences", _STOP_STRINGS, "the same as stop; both may be given"),
        accepted("stop_token_ids", ListOf(Whole(0, 1 << 31), MAX_ITEMS), "token ids that end the answer", "stop_token_ids"),
        accepted("bad_sequences", _WORDS, "strings that are never generated, alone or after a space"),
        accepted("ignore_eos_token", _FLAG, "the model's end token does not end the answer; default false", "ignore_eos"),
        accepted("ignore_eos", _FLAG, "the same as ignore_eos_token", "ignore_eos"),
        accepted("skip_special_tokens", _FLAG, "special tokens produce no text; default true", "skip_special_tokens"),
        accepted("add_special_tokens", _FLAG, "add the tokenizer's own prefix to the prompt; default true"),
        accepted("truncate", Whole(1, MAX_TOKENS), "use only the last N prompt tokens"),
        accepted("n", Whole(1, MAX_CHOICES), "answers; all but the first are in details.best_of_sequences; not with stream; default 1"),
        accepted(
            "best_of",
            Whole(1, MAX_CHOICES),
            "generate this many, return the n with the highest mean log-probability; not with stream; default n",
        ),
        accepted("return_full_text", _FLAG, "the prompt precedes the answer; default false. The 0.26 dialect omits it, as LMI 0.26 does"),
        accepted("details", _FLAG, "tokens, counts and finish reason; default false, true with tgi_compat"),
        accepted("decoder_input_details", _FLAG, "details.prefill: the prompt tokens; requires details; default false"),
        accepted(
            "top_n_tokens",
            Whole(0, MAX_LOGPROBS),
            "details.top_tokens: this many most likely tokens per position; requires details; default 0",
        ),
        accepted(
            "output_formatter", exactly(*FORMATTERS), f"one of {', '.join(FORMATTERS)}; the streaming ones stream even without stream"
        ),
        accepted("guided_json", ANYTHING, "a JSON schema, as an object or text"),
        accepted("guided_regex", _GRAMMAR, "a regular expression"),
        accepted("guided_choice", CHOICE_LIST, "a list of strings"),
        accepted("guided_grammar", _GRAMMAR, "a grammar in EBNF"),
        accepted("request_timeout", Real(0.001, 86400), "seconds; a partial answer has finish_reason length"),
        no_effect("stream", _FLAG, "stream belongs beside inputs; LMI ignores it here, too"),
        no_effect("streaming", _FLAG, "the same as stream"),
        no_effect("logprobs", ANYTHING, "every token of details and of a stream has its log-probability"),
        no_effect("guided_decoding_backend", Text(64), "xgrammar compiles every grammar"),
        no_effect("spaces_between_special_tokens", _FLAG, "no space is added or removed around special tokens"),
        rejected("typical_p", "typical sampling is not supported", 1, 1.0, 0),
        rejected("watermark", "text is not watermarked", False),
        rejected("use_beam_search", "it is not a parameter of LMI", False, alternative="Use num_beams."),
        rejected("adapters", "there are no adapters", ""),
        rejected("logits_processors", "code of clients is not executed"),
    ],
    noun="parameter",
)
