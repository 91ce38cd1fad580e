"""The table of request fields of POST /v1/responses. `docs/responses.md` shows it."""

from __future__ import annotations

from stoker.base.fields.table import ANYTHING, FieldRow, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Flag, ListOf, MappingOf, Real, Text, Whole, exactly
from stoker.base.types import MAX_LOGPROBS
from stoker.server.protocols.openai.fields import BOTH, MAX_TOKENS, MODEL_NAME

FLAG, OBJECT, OPTIONAL_TEXT = Flag(), MappingOf(), Text(512)
INCLUDES = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
# Sampling fields of completions that are not part of this API, and have no meaning for one choice of parsed text.
_NOT_HERE = (
    "prompt_logprobs",
    "length_penalty",
    "early_stopping",
    "n",
    "include_stop_str_in_output",
    "no_stop_trim",
    "skip_special_tokens",
)

_INPUT = accepted("input", ANYTHING, "text, or a list of items: messages, function calls and their outputs, reasoning")
_INSTRUCTIONS = accepted("instructions", Text(1 << 24), "a system message before the conversation; not part of later turns")
_PREVIOUS = accepted("previous_response_id", Text(128), "a stored response, whose conversation this one continues")
_TOOLS = accepted("tools", ListOf(OBJECT, 128), "functions that the model may call; tools that the server would run are rejected")
_CHOICE = accepted("tool_choice", ANYTHING, 'auto, none, required, {"type": "function", "name": …}, or allowed_tools')
_REASONING = accepted("reasoning", OBJECT, "effort is passed to the chat template, and none turns thinking off; summary has no effect")
_TEXT = accepted("text", OBJECT, "format: type text, json_object or json_schema")
_PARALLEL = accepted("parallel_tool_calls", FLAG, "false returns only the first call; default true")
_TRUNCATION = accepted("truncation", exactly("auto", "disabled"), "auto drops the oldest messages that do not fit; default disabled")

OWN: tuple[FieldRow, ...] = (
    accepted("model", MODEL_NAME, "a name listed by /v1/models; default: the first of them"),
    _INPUT,
    _INSTRUCTIONS,
    _PREVIOUS,
    accepted("store", FLAG, "the response can be retrieved and continued; default true"),
    accepted("background", FLAG, "return at once; retrieve the response later. Requires store, not with stream; default false"),
    accepted("stream", FLAG, "server-sent events instead of one response; default false"),
    accepted("max_output_tokens", Whole(1, MAX_TOKENS), "maximum number of new tokens; default: what fits the engine"),
    _TOOLS,
    _CHOICE,
    _PARALLEL,
    _REASONING,
    _TEXT,
    _TRUNCATION,
    accepted("include", ListOf(exactly(*INCLUDES), 16), "message.output_text.logprobs adds log-probabilities; others have no effect"),
    accepted("top_logprobs", Whole(0, MAX_LOGPROBS), "number of most likely tokens in the log-probabilities; default 0"),
    accepted("metadata", MappingOf(Text(64), Text(512)), "at most 16 strings, returned with the response"),
    accepted("user", OPTIONAL_TEXT, "returned with the response"),
    accepted("safety_identifier", OPTIONAL_TEXT, "returned with the response"),
    accepted("prompt_cache_key", OPTIONAL_TEXT, "returned with the response; cached prefixes are found by their content"),
    accepted("max_tool_calls", Whole(1, MAX_TOKENS), "returned with the response; it limits tools that a server runs"),
)
EXTENSIONS: tuple[FieldRow, ...] = (
    *(row for row in BOTH if row.target and row.name not in _NOT_HERE),
    accepted("top_k", Whole(-1, MAX_TOKENS), "0 and -1 disable it; default 0"),
    accepted("chat_template_kwargs", OBJECT, "switches of the chat template, such as enable_thinking"),
    accepted("priority", Whole(-(1 << 31), 1 << 31), "lower values are served first; default 0"),
    accepted("timeout_s", Real(0.001, 86400), "deadline; a partial answer is incomplete"),
    accepted("cache_salt", Text(256), "requests share cached prefixes only if their salts are equal"),
)
OTHER: tuple[FieldRow, ...] = (
    no_effect("stream_options", OBJECT, "chunks are not padded, and the last event contains the usage"),
    no_effect("service_tier", Text(64), "there is one tier; `priority` orders requests"),
    no_effect("prompt_cache_options", OBJECT, "cached prefixes are found by their content"),
    no_effect("prompt_cache_retention", Text(64), "cached prefixes are found by their content"),
    rejected("conversation", "conversations are not stored", alternative="Use previous_response_id."),
    rejected("prompt", "there are no stored prompt templates", alternative="Send instructions and input."),
    rejected("context_management", "conversations are not compacted", alternative="Use truncation."),
    rejected("moderation", "there is no moderation"),
    rejected("access_programs", "there are none"),
    rejected("image", "the model reads text only"),
)
TABLE = FieldTable((*OWN, *EXTENSIONS, *OTHER))
COUNT_TABLE = FieldTable(
    (OWN[0], _INPUT, _INSTRUCTIONS, _PREVIOUS, _TOOLS, _CHOICE, _PARALLEL, _REASONING, _TEXT, _TRUNCATION, TABLE["conversation"])
)
REASONING = FieldTable(
    (
        accepted("effort", Text(64), "passed to the chat template as reasoning_effort; none turns thinking off"),
        no_effect("summary", Text(64), "reasoning items contain the whole reasoning"),
        no_effect("generate_summary", Text(64), "reasoning items contain the whole reasoning"),
        no_effect("context", Text(64), "the chat template decides which earlier reasoning it renders"),
        rejected("mode", "there is one mode", "standard"),
    )
)
TEXT = FieldTable(
    (
        accepted("format", OBJECT, "type text, json_object or json_schema"),
        no_effect("verbosity", exactly("low", "medium", "high"), "the model has no such switch"),
    )
)
TOOL = FieldTable(
    (
        accepted("type", exactly("function")),
        accepted("name", ANYTHING),
        accepted("description", Text(1 << 24)),
        accepted("parameters", ANYTHING),
        no_effect("strict", FLAG, "arguments are enforced with tool_choice required or a function"),
        no_effect("output_schema", OBJECT, "chat templates have no place for it"),
        no_effect("allowed_callers", ListOf(Text(64), 16), "the client calls all tools"),
        rejected("async", "calls are not answered later", False),
        rejected("defer_loading", "all tools are part of the prompt", False),
    )
)
