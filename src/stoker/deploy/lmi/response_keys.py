"""Keys of serving.properties about requests and responses: formats, parsers of the output, timeouts."""

from __future__ import annotations

from stoker.base.fields.table import accepted, no_effect, rejected
from stoker.base.fields.values import Choice, Flag, Line, Whole, names
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.selection import AUTO
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS

_FLAG, _TEXT, _UNSIGNED = Flag(), Line(allow_empty=True), Whole(0)
# vLLM's names of parsers, where they differ: name → Stoker's name
VLLM_TOOL_PARSERS = {
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "pythonic": "llama4_pythonic",
    "openai": "gpt_oss",
    "minimax": "minimax_m1",
    "phi4_mini_json": "phi4_mini",
}
VLLM_REASONING_PARSERS = {"deepseek_v3": "deepseek_v31", "openai_gptoss": "gpt_oss"}

RESPONSE_ROWS = (
    accepted(
        "option.output_formatter",
        names("json", "jsonlines", "sse", "json_chat", "jsonlines_chat"),
        "custom functions are rejected",
        "options.output_formatter",
    ),
    rejected("option.input_formatter", "custom functions are not run", "", type=_TEXT),
    accepted(
        "option.enable_streaming",
        Choice({"true": True, "false": False, "huggingface": True}),
        "deprecated: jsonlines when true",
        "streaming",
    ),
    accepted(
        "option.tool_call_parser",
        Choice({**{name: name for name in (AUTO, *TOOL_PARSERS)}, **VLLM_TOOL_PARSERS}),
        "format of tool calls in the output of the model; default: auto, by the chat template",
        "server.tool_parser",
    ),
    accepted(
        "option.reasoning_parser",
        Choice({**{name: name for name in (AUTO, *REASONING_PARSERS)}, **VLLM_REASONING_PARSERS}),
        "default: reasoning is part of the text",
        "server.reasoning_parser",
    ),
    no_effect("option.enable_auto_tool_choice", _FLAG, "option.tool_call_parser enables it"),
    no_effect("option.enable_reasoning", _FLAG, "option.reasoning_parser enables it"),
    accepted("option.tgi_compat", _FLAG, target="options.tgi_compat"),
    accepted(
        "option.async_mode",
        Choice({"true": "async", "false": None}),
        "true: the response format of the async handler of LMI",
        "options.dialect",
    ),
    accepted(
        "option.lmi_dialect",
        names("head", "0.26", "0.27", "async"),
        "a key of Stoker: the LMI version whose response format is used",
        "options.dialect",
    ),
    rejected("option.bedrock_compat", "the format of Bedrock is not supported", False, type=_FLAG),
    rejected("option.enable_stateful_sessions", "sessions are not supported", False, type=_FLAG),
    no_effect("option.sessions_path", _TEXT, "it is a setting of option.enable_stateful_sessions, which is rejected"),
    no_effect("option.sessions_expiration", _UNSIGNED, "it is a setting of option.enable_stateful_sessions, which is rejected"),
    accepted("option.model_loading_timeout", Whole(1, 1 << 24), "seconds; default 1800", "server.load_timeout_s"),
    accepted("option.predict_timeout", Whole(1, 1 << 24), "seconds; default 120", "server.request_timeout_s"),
    no_effect("option.max_output_size", _UNSIGNED, "responses are streamed and not stored in one buffer"),
    no_effect("option.pythonExecutable", _TEXT, "no Python process is started for a model"),
    no_effect("option.device_id", _TEXT, "load_on_devices chooses devices"),
    no_effect("option.guided_decoding_backend", _TEXT, "xgrammar compiles all grammars"),
    no_effect("option.iter_stats_max_iterations", _UNSIGNED, "metrics are always at /metrics"),
    no_effect("option.request_stats_max_iterations", _UNSIGNED, "metrics are always at /metrics"),
    rejected(
        "option.normalize_log_probs",
        "log-probabilities are not divided by the length",
        False,
        type=_FLAG,
        alternative="Use length_penalty in requests.",
    ),
    rejected("option.gather_generation_logits", "no protocol returns logits", False, type=_FLAG, alternative="Request logprobs."),
)
