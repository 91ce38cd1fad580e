"""Every field that OpenAI clients send, and what becomes of it: honoured, without effect for a reason, or refused with one.

A field that is in no row is refused with the names nearest to it. The table is also the documentation.
"""

from __future__ import annotations

from typing import Any, Literal

from stoker.base.types import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from stoker.server.protocols.field_table import Row, checked
from stoker.server.protocols.openai import kinds
from stoker.server.protocols.openai.kinds import Kind

Door = Literal["completions", "chat"]

MAX_IDS = 1024
LARGE = 1 << 24


class Field(Row, frozen=True, kw_only=True):
    """One field, of one endpoint or both."""

    doors: tuple[Door, ...] = ("completions", "chat")


def _field(name: str, kind: Kind, says: str, param: str = "", doors: tuple[Door, ...] = ("completions", "chat")) -> Field:
    return Field(name=name, kind=kind, says=says, param=param, doors=doors)


def _completions(name: str, kind: Kind, says: str) -> Field:
    return _field(name, kind, says, doors=("completions",))


def _chat(name: str, kind: Kind, says: str) -> Field:
    return _field(name, kind, says, doors=("chat",))


def _idle(name: str, kind: Kind, reason: str) -> Field:
    return Field(name=name, kind=kind, says=reason, fate="no effect")


def _refused(name: str, reason: str, *harmless: Any, doors: tuple[Door, ...] = ("completions", "chat")) -> Field:
    return Field(name=name, kind=kinds.anything, says=reason, fate="refused", harmless=harmless, doors=doors)


TABLE: tuple[Field, ...] = (
    _field("model", kinds.text(512), "a name of /v1/models; without it, the first of them"),
    _completions("prompt", kinds.anything, "text, token ids, or a list of either"),
    _chat("messages", kinds.anything, "a list of role and content; content is a string or text parts"),
    _field("stream", kinds.boolean, "server-sent events instead of one answer"),
    _field("stream_options", kinds.mapping, "include_usage, continuous_usage_stats; with stream only"),
    _field("max_tokens", kinds.whole(0, LARGE), "completions: 16, and 0 with echo scores the prompt; chat: what fits the engine"),
    _chat("max_completion_tokens", kinds.whole(1, LARGE), "the same as max_tokens"),
    _field("min_tokens", kinds.whole(0, LARGE), "no end before so many tokens; 0", "min_tokens"),
    _field("temperature", kinds.number(0, 100), "1; 0 is greedy", "temperature"),
    _field("top_p", kinds.number(0, 1), "1", "top_p"),
    _field("top_k", kinds.whole(-1, LARGE), "0 and -1 are off"),
    _field("min_p", kinds.number(0, 1), "0", "min_p"),
    _field("seed", kinds.whole(-(2**63), 2**64 - 1), "the same seed gives the same tokens", "seed"),
    _field("n", kinds.whole(1, MAX_CHOICES), "answers for each prompt; 1", "n"),
    _completions("best_of", kinds.whole(1, MAX_CHOICES), "generates so many and returns the n most probable a token; not with stream"),
    _field("presence_penalty", kinds.number(-2, 2), "0", "presence_penalty"),
    _field("frequency_penalty", kinds.number(-2, 2), "0", "frequency_penalty"),
    _field("repetition_penalty", kinds.number(0.01, 100), "1", "repetition_penalty"),
    _field("logit_bias", kinds.token_biases, "token id to a number from -100 to 100", "logit_bias"),
    _field("stop", kinds.one_or_list_of(kinds.text(MAX_STOP_CHARS), MAX_STOP_STRINGS), "strings that end the answer", "stop"),
    _field("stop_token_ids", kinds.list_of(kinds.whole(0, 1 << 31), MAX_IDS), "ids that end the answer", "stop_token_ids"),
    _field("bad_words", kinds.list_of(kinds.text(MAX_STOP_CHARS), MAX_IDS), "strings never written, also after a space"),
    _field("ignore_eos", kinds.boolean, "the model's end ids don't end the answer; false", "ignore_eos"),
    _field("include_stop_str_in_output", kinds.boolean, "keeps the stop string in the text; false", "include_stop"),
    _field("no_stop_trim", kinds.boolean, "the same as include_stop_str_in_output", "include_stop"),
    _field("skip_special_tokens", kinds.boolean, "special tokens make no text; true", "skip_special_tokens"),
    _field("add_special_tokens", kinds.boolean, "the tokenizer's own prefix; completions: true, chat: false, as the template writes it"),
    _field("truncate_prompt_tokens", kinds.whole(-1, LARGE), "keeps the last so many prompt tokens; -1: as many as the engine takes"),
    _field("use_beam_search", kinds.boolean, "beams instead of samples: best_of or n of them; not with stream"),
    _field("length_penalty", kinds.number(-100, 100), "beams: score ÷ length ** length_penalty; 1", "length_penalty"),
    _field("early_stopping", kinds.boolean, "beams: end when enough candidates ended; false", "early_stopping"),
    _completions("echo", kinds.boolean, "the prompt's text before the answer; false"),
    _completions("logprobs", kinds.whole(0, MAX_LOGPROBS), "log-probabilities of each token and the so many best"),
    _chat("logprobs", kinds.boolean, "log-probabilities of each token; false"),
    _chat("top_logprobs", kinds.whole(0, MAX_LOGPROBS), "and of the so many best; with logprobs only"),
    _field("prompt_logprobs", kinds.whole(0, MAX_LOGPROBS), "log-probabilities of the prompt's tokens; not with stream", "prompt_logprobs"),
    _field("response_format", kinds.mapping, 'type text, json_object or json_schema (with json_schema.schema)'),
    _field("structured_outputs", kinds.mapping, "one of json, regex, choice, grammar, json_object, structural_tag"),
    _field("guided_json", kinds.anything, "a JSON schema, as an object or text"),
    _field("guided_regex", kinds.text(1 << 20), "a regular expression"),
    _field("guided_choice", kinds.list_of(kinds.text(1 << 16), MAX_IDS), "a list of strings"),
    _field("guided_grammar", kinds.text(1 << 20), "a grammar in EBNF"),
    _field("json_schema", kinds.anything, "the same as guided_json"),
    _field("regex", kinds.text(1 << 20), "the same as guided_regex"),
    _field("ebnf", kinds.text(1 << 20), "the same as guided_grammar"),
    _chat("tools", kinds.list_of(kinds.mapping, 128), "functions that the model may call"),
    _chat("tool_choice", kinds.anything, 'auto, none, required, or {"type": "function", "function": {"name": …}}'),
    _chat("parallel_tool_calls", kinds.boolean, "false keeps the first call only; true"),
    _chat("chat_template_kwargs", kinds.mapping, "switches of the chat template, such as enable_thinking"),
    _chat("reasoning_effort", kinds.text(64), "given to the chat template"),
    _chat("documents", kinds.list_of(kinds.mapping, MAX_IDS), "given to the chat template"),
    _chat("add_generation_prompt", kinds.boolean, "ends the prompt where the assistant begins; true"),
    _chat("continue_final_message", kinds.boolean, "the model goes on with the last message; needs add_generation_prompt=false"),
    _field("priority", kinds.whole(-(1 << 31), 1 << 31), "lower is sooner; 0"),
    _field("timeout_s", kinds.number(0.001, 86400), "a deadline: the answer so far ends with finish_reason length, stop_reason deadline"),
    _field("request_id", kinds.text(128), "part of the answer's id; must not be in flight already"),
    _field("rid", kinds.text(128), "the same as request_id"),
    _field("cache_salt", kinds.text(256), "requests share cached prefixes only with equal salts"),
    _idle("user", kinds.text(512), "accepted; requests are not kept by user"),
    _idle("safety_identifier", kinds.text(512), "accepted; requests are not kept by user"),
    _idle("prompt_cache_key", kinds.text(512), "accepted; prefixes are found by their content"),
    _idle("metadata", kinds.mapping, "accepted; answers are not stored"),
    _idle("service_tier", kinds.text(64), "accepted; there is one tier, and `priority` orders requests"),
    _idle("spaces_between_special_tokens", kinds.boolean, "accepted; no space is added or taken away around special tokens"),
    _idle("separate_reasoning", kinds.one_of(True), "accepted; --reasoning-parser separates it"),
    _refused("suffix", "text is generated at the end only; models here don't fill gaps", "", doors=("completions",)),
    _refused("detokenize", "answers are text", True),
    _refused("allowed_token_ids", "use logit_bias or a grammar"),
    _refused("chat_template", "a request cannot bring a template; the model's own is used", doors=("chat",)),
    _refused("functions", "it is replaced by tools", doors=("chat",)),
    _refused("function_call", "it is replaced by tool_choice", doors=("chat",)),
    _refused("modalities", "answers are text", ["text"], doors=("chat",)),
    _refused("audio", "answers are text", doors=("chat",)),
    _refused("prediction", "there is no predicted output", doors=("chat",)),
    _refused("web_search_options", "there is no web search", doors=("chat",)),
    _refused("store", "answers are not stored", False, doors=("chat",)),
    _refused("verbosity", "the model has no such switch", "medium", doors=("chat",)),
    _refused("kv_transfer_params", "prefill and decode run in one executor"),
    _refused("disaggregated_params", "prefill and decode run in one executor"),
    _refused("lora_request", "there are no adapters"),
    _refused("lora_path", "there are no adapters"),
    _refused("logits_processors", "code of clients is not run"),
    _refused("return_context_logits", "use prompt_logprobs", False),
)  # fmt: skip


def table(door: Door) -> dict[str, Field]:
    """The rows of one door, by name."""
    return {field.name: field for field in TABLE if door in field.doors}


_TABLES: dict[Door, dict[str, Field]] = {"completions": table("completions"), "chat": table("chat")}


def check_fields(door: Door, body: dict[str, Any]) -> dict[str, Any]:
    """The honoured fields of a request with their checked values; null counts as absent. Raises RequestError."""
    return checked(body, _TABLES[door])
