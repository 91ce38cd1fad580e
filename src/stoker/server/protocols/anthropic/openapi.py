"""The operations of Anthropic's API for /openapi.json."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema, table_schema
from stoker.server.operation import INTEGER, OBJECT, STRING, Operation, constant, list_of, nullable, one_of, record
from stoker.server.protocols.anthropic.fields import COUNT_TABLE, TABLE

ERROR = record({"type": constant("error"), "error": record({"type": STRING, "message": STRING})}, "AnthropicError")
_BLOCKS: Schema = one_of(STRING, list_of(record({"type": STRING}, "InputBlock", extra=True)))
_SHAPES: dict[str, Schema] = {
    "messages": {
        **list_of(record({"role": constant("user", "assistant", "system"), "content": _BLOCKS}, "InputMessage", extra=True)),
        "minItems": 1,
    },
    "system": _BLOCKS,
    "tools": {**list_of(record({"name": STRING, "input_schema": OBJECT}, "ClientTool", extra=True)), "maxItems": 256},
}
_USAGE = record(
    {
        "input_tokens": INTEGER,
        "cache_creation_input_tokens": INTEGER,
        "cache_read_input_tokens": INTEGER,
        "output_tokens": INTEGER,
        "output_tokens_details": record({"thinking_tokens": INTEGER}),
    },
    "MessageUsage",
)
_CONTENT_BLOCK: Schema = one_of(
    record({"type": constant("text"), "text": STRING}, "TextBlock"),
    record({"type": constant("thinking"), "thinking": STRING, "signature": STRING}, "ThinkingBlock"),
    record({"type": constant("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}, "ToolUseBlock"),
)
_STOP = {
    "stop_reason": constant("end_turn", "max_tokens", "stop_sequence", "tool_use", None),
    "stop_sequence": nullable(STRING),
}
MESSAGE = record(
    {
        "id": STRING,
        "type": constant("message"),
        "role": constant("assistant"),
        "model": STRING,
        "content": list_of(_CONTENT_BLOCK),
        **_STOP,
        "usage": _USAGE,
    },
    "Message",
)
_DELTA: Schema = one_of(
    record({"type": constant("text_delta"), "text": STRING}, "TextDelta"),
    record({"type": constant("thinking_delta"), "thinking": STRING}, "ThinkingDelta"),
    record({"type": constant("signature_delta"), "signature": STRING}, "SignatureDelta"),
    record({"type": constant("input_json_delta"), "partial_json": STRING}, "InputJsonDelta"),
)
EVENT: Schema = one_of(
    record({"type": constant("message_start"), "message": MESSAGE}, "MessageStart"),
    record({"type": constant("ping")}, "Ping"),
    record({"type": constant("content_block_start"), "index": INTEGER, "content_block": _CONTENT_BLOCK}, "ContentBlockStart"),
    record({"type": constant("content_block_delta"), "index": INTEGER, "delta": _DELTA}, "ContentBlockDelta"),
    record({"type": constant("content_block_stop"), "index": INTEGER}, "ContentBlockStop"),
    record({"type": constant("message_delta"), "delta": record(_STOP), "usage": _USAGE}, "MessageDelta"),
    record({"type": constant("message_stop")}, "MessageStop"),
    ERROR,
)

OPERATIONS = {
    ("POST", "/v1/messages"): Operation(
        summary="Answer a conversation", body=table_schema(TABLE, _SHAPES, ["max_tokens", "messages"]), response=MESSAGE, stream=EVENT
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Count the tokens of a prompt",
        body=table_schema(COUNT_TABLE, _SHAPES, ["messages"]),
        response=record({"input_tokens": INTEGER}),
    ),
}
