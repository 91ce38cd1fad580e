"""The tables of request fields.

They cover the fields of OpenAI's API and the extensions of vLLM and SGLang. `docs/openai.md` shows them.
"""

from __future__ import annotations

from typing import Any, Literal

from stoker.base.fields.table import ANYTHING, FieldRow, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Flag, ListOf, MappingOf, Real, Text, Whole, exactly
from stoker.base.types import MAX_ALLOWED_TOKENS, MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from stoker.server.protocols.common.guides import CHOICE_LIST

EndpointName = Literal["completions", "chat"]

MAX_ITEMS = 1024
MAX_TOKENS = 1 << 24
MAX_GRAMMAR_CHARS = 1 << 20

FLAG, OBJECT = Flag(), MappingOf()
MODEL_NAME = Text(512)
_TOKEN_COUNT = Whole(0, MAX_TOKENS)
_TOP_COUNT = Whole(0, MAX_LOGPROBS)
_SEED = Whole(-(2**63), 2**64 - 1)
_STOP_STRINGS = ListOf(Text(MAX_STOP_CHARS), MAX_STOP_STRINGS, or_one=True)
_TOKEN_BIASES = MappingOf(Whole(0, 10**11 - 1), Real(-100, 100), noun="token ids")
_ALLOWED_IDS = ListOf(Whole(0, 1 << 31), MAX_ALLOWED_TOKENS)
_GRAMMAR = Text(MAX_GRAMMAR_CHARS)

BOTH: tuple[FieldRow, ...] = (
    accepted("model", MODEL_NAME, "a name listed by /v1/models; default: the first of them"),
    accepted("stream", FLAG, "server-sent events instead of one response; default false"),
    accepted("stream_options", OBJECT, "include_usage, continuous_usage_stats, include_obfuscation; requires stream"),
    accepted("max_tokens", _TOKEN_COUNT, "default: 16 (completions), what fits the engine (chat); 0 with echo scores the prompt"),
    accepted("min_tokens", _TOKEN_COUNT, "tokens before the answer may end; default 0", "min_tokens"),
    accepted("temperature", Real(0, 100), "default 1; 0 is greedy decoding", "temperature"),
    accepted("top_p", Real(0, 1), "default 1", "top_p"),
    accepted("top_k", Whole(-1, MAX_TOKENS), "0 and -1 disable it; default 0"),
    accepted("min_p", Real(0, 1), "default 0", "min_p"),
    accepted("seed", _SEED, "equal seeds give equal tokens", "seed"),
    accepted("n", Whole(1, MAX_CHOICES), "choices per prompt; default 1", "n"),
    accepted("presence_penalty", Real(-2, 2), "default 0", "presence_penalty"),
    accepted("frequency_penalty", Real(-2, 2), "default 0", "frequency_penalty"),
    accepted("repetition_penalty", Real(0.01, 100), "default 1", "repetition_penalty"),
    accepted("logit_bias", _TOKEN_BIASES, "token id → a number from -100 to 100", "logit_bias"),
    accepted("allowed_token_ids", _ALLOWED_IDS, "the only token ids that are generated; end ids among them", "allowed_token_ids"),
    accepted("stop", _STOP_STRINGS, "strings that end the answer", "stop"),
    accepted("stop_token_ids", ListOf(Whole(0, 1 << 31), MAX_ITEMS), "token ids that end the answer", "stop_token_ids"),
    accepted("bad_words", ListOf(Text(MAX_STOP_CHARS, min_chars=1), MAX_ITEMS), "strings that are never generated, alone or after a space"),
    accepted("ignore_eos", FLAG, "the model's end tokens do not end the answer; default false", "ignore_eos"),
    accepted("include_stop_str_in_output", FLAG, "the text includes the stop string; default false", "include_stop"),
    accepted("no_stop_trim", FLAG, "the same as include_stop_str_in_output", "include_stop"),
    accepted("skip_special_tokens", FLAG, "special tokens produce no text; default true", "skip_special_tokens"),
    accepted(
        "add_special_tokens", FLAG, "add the tokenizer's own prefix; default: true (completions), false (chat, whose template writes it)"
    ),
    accepted("truncate_prompt_tokens", Whole(-1, MAX_TOKENS), "use only the last N prompt tokens; -1: as many as the engine accepts"),
    accepted("truncation_side", exactly("left", "right"), "right: truncate_prompt_tokens keeps the first N tokens; default left"),
    accepted("use_beam_search", FLAG, "beam search with best_of or n beams; not with stream"),
    accepted("length_penalty", Real(-100, 100), "beam search: score ÷ length ** length_penalty; default 1", "length_penalty"),
    accepted("early_stopping", FLAG, "beam search: end when enough candidates have ended; default false", "early_stopping"),
    accepted("prompt_logprobs", _TOP_COUNT, "log-probabilities of the prompt tokens; not with stream", "prompt_logprobs"),
    accepted("detokenize", FLAG, "false: no text; set return_token_ids; default true"),
    accepted("return_token_ids", FLAG, "responses contain token_ids and prompt_token_ids; default false"),
    accepted("response_format", OBJECT, "type text, json_object, structural_tag, or json_schema (with json_schema.schema)"),
    accepted("structured_outputs", OBJECT, "one of json, regex, choice, grammar, json_object, structural_tag"),
    accepted("guided_json", ANYTHING, "a JSON schema, as an object or text"),
    accepted("guided_regex", _GRAMMAR, "a regular expression"),
    accepted("guided_choice", CHOICE_LIST, "a list of strings"),
    accepted("guided_grammar", _GRAMMAR, "a grammar in EBNF"),
    accepted("json_schema", ANYTHING, "the same as guided_json"),
    accepted("regex", _GRAMMAR, "the same as guided_regex"),
    accepted("ebnf", _GRAMMAR, "the same as guided_grammar"),
    accepted("priority", Whole(-(1 << 31), 1 << 31), "lower values are served first; default 0"),
    accepted("timeout_s", Real(0.001, 86400), "deadline; a partial answer has finish_reason length and stop_reason deadline"),
    accepted("request_id", Text(128), "becomes part of the response's id; must not be in flight already"),
    accepted("rid", Text(128), "the same as request_id"),
    accepted("cache_salt", Text(256), "requests share cached prefixes only if their salts are equal"),
    no_effect("user", Text(512), "requests are not grouped by user"),
    no_effect("safety_identifier", Text(512), "requests are not grouped by user"),
    no_effect("prompt_cache_key", Text(512), "cached prefixes are found by their content"),
    no_effect("metadata", OBJECT, "responses are not stored"),
    no_effect("service_tier", Text(64), "there is one tier; `priority` orders requests"),
    no_effect("spaces_between_special_tokens", FLAG, "no space is added or removed around special tokens"),
    no_effect("separate_reasoning", exactly(True), "the server option --reasoning-parser separates reasoning"),
    rejected("kv_transfer_params", "prefill and decode run in one executor"),
    rejected("disaggregated_params", "prefill and decode run in one executor"),
    rejected("lora_request", "there are no adapters"),
    rejected("lora_path", "there are no adapters"),
    rejected("logits_processors", "code of clients is not executed"),
    rejected("return_context_logits", "logits are not returned", False, alternative="Use prompt_logprobs."),
)

COMPLETIONS_ONLY: tuple[FieldRow, ...] = (
    accepted("prompt", ANYTHING, "text, token ids, or a list of either"),
    accepted("best_of", Whole(1, MAX_CHOICES), "generate this many, return the n with the highest mean log-probability; not with stream"),
    accepted("echo", FLAG, "the prompt's text precedes the answer; default false"),
    accepted("logprobs", _TOP_COUNT, "log-probabilities of each token and of this many best ones"),
    rejected("suffix", "text is generated at the end only; filling gaps is not supported", ""),
)

CHAT_ONLY: tuple[FieldRow, ...] = (
    accepted("messages", ANYTHING, "a list of role and content; content is a string or text parts"),
    accepted("max_completion_tokens", Whole(1, MAX_TOKENS), "the same as max_tokens"),
    accepted("logprobs", FLAG, "log-probabilities of each token; default false"),
    accepted("top_logprobs", _TOP_COUNT, "and of this many best tokens; requires logprobs"),
    accepted("tools", ListOf(OBJECT, 128), "functions that the model may call"),
    accepted("tool_choice", ANYTHING, 'auto, none, required, {"type": "function", "function": {"name": …}}, or allowed_tools'),
    accepted("echo", FLAG, "the answer begins with the last message if it has the same role; default false"),
    accepted("parallel_tool_calls", FLAG, "false returns only the first call; default true"),
    accepted("chat_template_kwargs", OBJECT, "switches of the chat template, such as enable_thinking"),
    accepted("reasoning_effort", Text(64), "passed to the chat template"),
    accepted("documents", ListOf(OBJECT, MAX_ITEMS), "passed to the chat template"),
    accepted("add_generation_prompt", FLAG, "the prompt ends where the assistant's turn begins; default: not continue_final_message"),
    accepted("continue_final_message", FLAG, "the model continues the last message; default false"),
    rejected("chat_template", "a request cannot supply a template", alternative="Leave it out; the model's own template is used."),
    rejected("functions", "it was replaced by tools", alternative="Use tools."),
    rejected("function_call", "it was replaced by tool_choice", alternative="Use tool_choice."),
    rejected("modalities", "responses are text", ["text"]),
    rejected("audio", "responses are text"),
    accepted("prediction", OBJECT, "what the answer is expected to contain; with `--speculate`, it is verified as a draft"),
    rejected("web_search_options", "there is no web search"),
    rejected("store", "responses are not stored", False),
    rejected("verbosity", "the model has no such switch", "medium"),
)

TABLES: dict[EndpointName, FieldTable[FieldRow]] = {
    "completions": FieldTable((*BOTH, *COMPLETIONS_ONLY)),
    "chat": FieldTable((*BOTH, *CHAT_ONLY)),
}

STREAM_OPTIONS = FieldTable(
    [
        accepted("include_usage", FLAG, "a last chunk without choices contains the usage"),
        accepted("continuous_usage_stats", FLAG, "every chunk contains the usage so far; no effect with include_usage=false"),
        no_effect("include_obfuscation", FLAG, "chunks are not padded"),
    ]
)

_CHAT_PROMPT = [row for row in CHAT_ONLY if row.name in ("messages", "add_generation_prompt", "continue_final_message")]
TOKENIZE = FieldTable(
    [
        accepted("model", MODEL_NAME),
        accepted("prompt", ANYTHING),
        accepted("add_special_tokens", FLAG),
        accepted("return_token_strs", FLAG),
        *_CHAT_PROMPT,
    ]
)
DETOKENIZE = FieldTable([accepted("model", MODEL_NAME), accepted("tokens", ListOf(Whole(0, 1 << 31), MAX_TOKENS))])


def check_fields(endpoint: EndpointName, body: dict[str, Any]) -> dict[str, Any]:
    """The accepted fields of a request with their checked values. A null counts as absent. Raises RequestError."""
    return TABLES[endpoint].check(body)
