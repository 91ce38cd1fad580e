"""The operations of OpenAI's API for /openapi.json. Schemas of requests are those of the field tables."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema, table_schema
from stoker.server.operation import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Operation,
    constant,
    list_of,
    map_of,
    nullable,
    one_of,
    record,
)
from stoker.server.protocols.openai import fields
from stoker.server.protocols.openai.batches.openapi import OPERATIONS as BATCHES
from stoker.server.protocols.openai.responses.openapi import OPERATIONS as RESPONSES

ERROR = record(
    {"error": record({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)}, extra=True)}, "OpenAIError"
)
IDS: Schema = list_of(INTEGER)
USAGE = record(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": record({"cached_tokens": INTEGER}),
        "completion_tokens_details?": record({"accepted_prediction_tokens": INTEGER, "rejected_prediction_tokens": INTEGER}),
        "timings_ms?": record(dict.fromkeys(("prepare", "queue", "prefill", "decode", "compute", "total"), NUMBER)),
    },
    "Usage",
)
TOOL_CALL = record(
    {"id": STRING, "type": constant("function"), "function": record({"name": STRING, "arguments": STRING})},
    "ToolCall",
)
TOOL_CALL_DELTA = record(
    {"index": INTEGER, "id?": STRING, "type?": constant("function"), "function": record({"name?": STRING, "arguments": STRING})},
    "ToolCallDelta",
)
_SCORED = {"token": STRING, "logprob": NUMBER, "bytes": IDS}
CHAT_LOGPROBS = record(
    {"content": list_of(record({**_SCORED, "top_logprobs": list_of(record(_SCORED))})), "refusal": constant(None)}, "ChatLogprobs"
)
COMPLETION_LOGPROBS = record(
    {
        "text_offset": IDS,
        "token_logprobs": list_of(nullable(NUMBER)),
        "tokens": list_of(STRING),
        "top_logprobs": list_of(nullable(map_of(NUMBER))),
    },
    "CompletionLogprobs",
)
PROMPT_LOGPROBS: Schema = list_of(
    nullable(map_of(record({"logprob": NUMBER, "rank": nullable(INTEGER), "decoded_token": STRING}))),
)
FINISH_REASON: Schema = constant("stop", "length", "tool_calls", None)
STOP_REASON: Schema = one_of(STRING, INTEGER, {"type": "null"})
CONTENT: Schema = one_of(STRING, list_of(record({"type": STRING, "text": STRING}, extra=True)), {"type": "null"})
MESSAGE = record(
    {
        "role": STRING,
        "content?": CONTENT,
        "name?": STRING,
        "tool_calls?": nullable(list_of(OBJECT)),
        "tool_call_id?": STRING,
        "reasoning_content?": nullable(STRING),
    },
    "ChatMessage",
    extra=True,
)
TOOL = record(
    {
        "type": constant("function"),
        "function": record({"name": STRING, "description?": nullable(STRING), "parameters?": nullable(OBJECT)}, extra=True),
    },
    "ChatTool",
    extra=True,
)
_ANSWER = record(
    {"role": STRING, "content": nullable(STRING), "reasoning_content?": nullable(STRING), "tool_calls?": list_of(TOOL_CALL)}, "Answer"
)
_DELTA = record(
    {"role?": STRING, "content?": nullable(STRING), "reasoning_content?": STRING, "tool_calls?": list_of(TOOL_CALL_DELTA)}, "AnswerDelta"
)
_HEAD = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
_ENDING = {"finish_reason": FINISH_REASON, "stop_reason?": STOP_REASON, "token_ids?": IDS}
CHAT_COMPLETION = record(
    {
        **_HEAD,
        "choices": list_of(record({"index": INTEGER, "message": _ANSWER, "logprobs": nullable(CHAT_LOGPROBS), **_ENDING})),
        "usage": USAGE,
        "prompt_logprobs?": nullable(PROMPT_LOGPROBS),
        "prompt_token_ids?": IDS,
    },
    "ChatCompletion",
)
CHAT_CHUNK = record(
    {
        **_HEAD,
        "choices": list_of(record({"index": INTEGER, "delta": _DELTA, "logprobs": nullable(CHAT_LOGPROBS), **_ENDING})),
        "usage?": nullable(USAGE),
        "prompt_token_ids?": IDS,
    },
    "ChatCompletionChunk",
)
_COMPLETION_CHOICE = record(
    {
        "index": INTEGER,
        "text": STRING,
        "logprobs": nullable(COMPLETION_LOGPROBS),
        **_ENDING,
        "prompt_logprobs?": nullable(PROMPT_LOGPROBS),
        "prompt_token_ids?": IDS,
    },
    "CompletionChoice",
)
COMPLETION = record({**_HEAD, "choices": list_of(_COMPLETION_CHOICE), "usage": USAGE}, "Completion")
COMPLETION_CHUNK = record({**_HEAD, "choices": list_of(_COMPLETION_CHOICE), "usage?": nullable(USAGE)}, "CompletionChunk")
MODEL = record(
    {
        "id": STRING,
        "object": constant("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "parent": nullable(STRING),
        "max_model_len": INTEGER,
        "type": constant("model"),
        "display_name": STRING,
        "created_at": STRING,
    },
    "Model",
)
_PROMPT: Schema = one_of(STRING, IDS, list_of(STRING), list_of(IDS))
_MESSAGES: Schema = {**list_of(MESSAGE), "minItems": 1}
_CHAT_SHAPES: dict[str, Schema] = {
    "messages": _MESSAGES,
    "tools": {**list_of(TOOL), "maxItems": 128},
    "tool_choice": one_of(STRING, OBJECT),
}
_DONE: Schema = constant("[DONE]")

OPERATIONS = {
    ("POST", "/v1/completions"): Operation(
        summary="Complete one or several prompts",
        body=table_schema(fields.TABLES["completions"], {"prompt": _PROMPT}, ["prompt"]),
        response=COMPLETION,
        stream=one_of(COMPLETION_CHUNK, ERROR, _DONE),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation",
        body=table_schema(fields.TABLES["chat"], _CHAT_SHAPES, ["messages"]),
        response=CHAT_COMPLETION,
        stream=one_of(CHAT_CHUNK, ERROR, _DONE),
    ),
    ("GET", "/v1/models"): Operation(
        summary="The served models",
        response=record(
            {
                "object": constant("list"),
                "data": list_of(MODEL),
                "first_id": nullable(STRING),
                "last_id": nullable(STRING),
                "has_more": BOOLEAN,
            }
        ),
    ),
    ("GET", "/v1/models/{model:path}"): Operation(summary="One model", response=MODEL),
    ("GET", "/load"): Operation(summary="The number of requests that run or wait", response=record({"server_load": INTEGER})),
    ("POST", "/tokenize"): Operation(
        summary="Convert a prompt or messages to token ids",
        body=table_schema(fields.TOKENIZE, {"prompt": STRING, "messages": _MESSAGES}),
        response=record({"count": INTEGER, "max_model_len": INTEGER, "tokens": IDS, "token_strs?": list_of(STRING)}),
    ),
    ("POST", "/detokenize"): Operation(
        summary="Convert token ids to text",
        body=table_schema(fields.DETOKENIZE, required=["tokens"]),
        response=record({"prompt": STRING}),
    ),
    **RESPONSES,
    **BATCHES,
}
