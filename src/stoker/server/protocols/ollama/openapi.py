"""The operations of Ollama's API for /openapi.json."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema, table_schema
from stoker.server.operation import BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, Operation, constant, list_of, one_of, record
from stoker.server.protocols.ollama.fields import CHAT, GENERATE, OPTIONS, SHOW

ERROR = record({"error": STRING}, "OllamaError")
_MESSAGE = record(
    {"role": constant("system", "user", "assistant", "tool"), "content?": one_of(STRING, {"type": "null"})}, "OllamaMessage", extra=True
)
_SHAPES: dict[str, Schema] = {
    "messages": list_of(_MESSAGE),
    "tools": {**list_of(record({"type?": constant("function"), "function": OBJECT}, "OllamaTool", extra=True)), "maxItems": 128},
    "options": {"title": "OllamaOptions", **table_schema(OPTIONS)},
    "format": one_of(constant("", "json"), OBJECT),
    "think": one_of(BOOLEAN, constant("low", "medium", "high")),
    "keep_alive": one_of(STRING, NUMBER),
}
_CALL = record({"function": record({"name": STRING, "arguments": OBJECT})})
_ANSWER = record({"role": constant("assistant"), "content": STRING, "thinking?": STRING, "tool_calls?": list_of(_CALL)}, "OllamaAnswer")
_SCORED = {"token": STRING, "logprob": NUMBER, "bytes": list_of(INTEGER)}
_COMMON = {
    "model": STRING,
    "created_at": STRING,
    "done": BOOLEAN,
    "done_reason?": constant("stop", "length", "load"),
    "total_duration?": INTEGER,
    "load_duration?": INTEGER,
    "prompt_eval_count?": INTEGER,
    "prompt_eval_duration?": INTEGER,
    "eval_count?": INTEGER,
    "eval_duration?": INTEGER,
    "logprobs?": list_of(record({**_SCORED, "top_logprobs": list_of(record(_SCORED))})),
}
CHAT_RESPONSE = record({**_COMMON, "message": _ANSWER}, "OllamaChatResponse")
GENERATE_RESPONSE = record({**_COMMON, "response": STRING, "thinking?": STRING, "context?": list_of(INTEGER)}, "OllamaGenerateResponse")
_DETAILS = record(
    {
        "parent_model": STRING,
        "format": STRING,
        "family": STRING,
        "families": list_of(STRING),
        "parameter_size": STRING,
        "quantization_level": STRING,
    },
    "OllamaDetails",
)
_MODEL = {"name": STRING, "model": STRING, "size": INTEGER, "digest": STRING, "details": _DETAILS}
_LINES = "application/x-ndjson"

OPERATIONS = {
    ("POST", "/api/chat"): Operation(
        summary="Answer a conversation",
        body=table_schema(CHAT, _SHAPES),
        response=CHAT_RESPONSE,
        stream=one_of(CHAT_RESPONSE, ERROR),
        stream_type=_LINES,
    ),
    ("POST", "/api/generate"): Operation(
        summary="Answer a prompt",
        body=table_schema(GENERATE, _SHAPES),
        response=GENERATE_RESPONSE,
        stream=one_of(GENERATE_RESPONSE, ERROR),
        stream_type=_LINES,
    ),
    ("GET", "/api/tags"): Operation(
        summary="The served models", response=record({"models": list_of(record({**_MODEL, "modified_at": STRING}))})
    ),
    ("GET", "/api/ps"): Operation(
        summary="The loaded models",
        response=record({"models": list_of(record({**_MODEL, "size_vram": INTEGER, "expires_at": STRING, "context_length": INTEGER}))}),
    ),
    ("POST", "/api/show"): Operation(
        summary="One model",
        body=table_schema(SHOW),
        response=record(
            {
                "modelfile": STRING,
                "parameters": STRING,
                "template": STRING,
                "details": _DETAILS,
                "model_info": OBJECT,
                "capabilities": list_of(STRING),
                "modified_at": STRING,
            },
            "OllamaShow",
        ),
    ),
    ("GET", "/api/version"): Operation(summary="The release of Ollama whose API this is", response=record({"version": STRING})),
}
