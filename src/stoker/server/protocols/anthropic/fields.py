"""The table of request fields of POST /v1/messages. `docs/anthropic.md` shows it."""

from __future__ import annotations

from stoker.base.fields.table import ANYTHING, FieldRow, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Flag, ListOf, MappingOf, Real, Text, Whole, exactly
from stoker.base.types import MAX_STOP_CHARS, MAX_STOP_STRINGS

MAX_TOKENS = 1 << 24
FLAG, OBJECT, NAME = Flag(), MappingOf(), Text(512)
EFFORTS = ("low", "medium", "high", "xhigh", "max")

PROMPT: tuple[FieldRow, ...] = (
    accepted("model", NAME, "a name listed by /v1/models; default: the first of them"),
    accepted("messages", ANYTHING, "role, and text or blocks of text, thinking, tool_use, tool_result; a last answer is continued"),
    accepted("system", ANYTHING, "text, or text blocks"),
    accepted("tools", ListOf(OBJECT, 256), "functions of the client; tools that the server would run are rejected"),
    accepted("tool_choice", OBJECT, "type auto, any, none or tool (with name); disable_parallel_tool_use returns only the first call"),
    accepted("thinking", OBJECT, "type enabled, adaptive or disabled turns thinking of the template on or off; without it, off"),
    accepted("output_config", OBJECT, "format: a json_schema; effort is passed to the template as reasoning_effort"),
    no_effect("cache_control", OBJECT, "prefixes are always cached"),
    no_effect("context_management", OBJECT, "messages are used as they are"),
    no_effect("user_profile_id", NAME, "requests are not grouped by user"),
    no_effect("workspace_id", NAME, "there are no workspaces"),
    rejected("speed", "there is one speed", "standard"),
    rejected("mcp_servers", "the server connects to no other servers", []),
)
GENERATION: tuple[FieldRow, ...] = (
    accepted("max_tokens", Whole(1, MAX_TOKENS), "maximum number of new tokens, including thinking; required"),
    accepted("stream", FLAG, "server-sent events instead of one response; default false"),
    accepted("stop_sequences", ListOf(Text(MAX_STOP_CHARS), MAX_STOP_STRINGS), "strings that end the answer", "stop"),
    accepted("temperature", Real(0, 100), "default 1; 0 is greedy decoding", "temperature"),
    accepted("top_k", Whole(0, MAX_TOKENS), "0 disables it; default 0", "top_k"),
    accepted("top_p", Real(0, 1), "default 1", "top_p"),
    accepted("output_format", OBJECT, "the same as output_config.format"),
    no_effect("metadata", OBJECT, "requests are not grouped by user"),
    no_effect("service_tier", exactly("auto", "standard_only"), "there is one tier; `priority` orders requests"),
    no_effect("inference_geo", NAME, "the server is where it is"),
    no_effect("diagnostics", OBJECT, "usage has the number of cached tokens"),
    rejected("container", "there are no containers"),
)
EXTENSIONS: tuple[FieldRow, ...] = (
    accepted("min_p", Real(0, 1), "default 0", "min_p"),
    accepted("seed", Whole(-(2**63), 2**64 - 1), "equal seeds give equal tokens", "seed"),
    accepted("repetition_penalty", Real(0.01, 100), "default 1", "repetition_penalty"),
    accepted("chat_template_kwargs", OBJECT, "switches of the chat template"),
    accepted("priority", Whole(-(1 << 31), 1 << 31), "lower values are served first; default 0"),
    accepted("timeout_s", Real(0.001, 86400), "deadline; a partial answer has the stop reason max_tokens"),
    accepted("cache_salt", Text(256), "requests share cached prefixes only if their salts are equal"),
)
TABLE = FieldTable((*PROMPT, *GENERATION, *EXTENSIONS))
COUNT_TABLE = FieldTable(PROMPT)
OUTPUT_CONFIG = FieldTable((accepted("effort", exactly(*EFFORTS)), accepted("format", OBJECT)))
THINKING = FieldTable(
    (
        accepted("type", exactly("enabled", "disabled", "adaptive", "between_tools")),
        no_effect("budget_tokens", Whole(1, MAX_TOKENS), "max_tokens limits thinking and answer together"),
        accepted("display", exactly("summarized", "omitted")),
    )
)
_ENFORCED = "arguments are enforced with tool_choice of type any or tool"
TOOL = FieldTable(
    (
        accepted("type", NAME, "custom, or nothing"),
        accepted("name", ANYTHING),
        accepted("description", Text()),
        accepted("input_schema", ANYTHING),
        no_effect("strict", FLAG, _ENFORCED),
        no_effect("cache_control", OBJECT, "prefixes are always cached"),
        no_effect("eager_input_streaming", FLAG, "arguments are always streamed"),
        no_effect("input_examples", ListOf(OBJECT, 128), "chat templates have no place for examples"),
        no_effect("allowed_callers", ListOf(NAME, 16), "the client calls all tools"),
        rejected("defer_loading", "all tools are part of the prompt", False),
    )
)
TOOL_CHOICE = FieldTable(
    (accepted("type", exactly("auto", "any", "tool", "none")), accepted("name", Text(256)), accepted("disable_parallel_tool_use", FLAG))
)
