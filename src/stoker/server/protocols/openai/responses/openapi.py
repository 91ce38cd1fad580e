"""The operations of the Responses API for /openapi.json."""

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
from stoker.server.protocols.openai.responses.fields import COUNT_TABLE, TABLE

_STATUS = constant("queued", "in_progress", "completed", "incomplete", "cancelled", "failed")
_SCORED = {"token": STRING, "logprob": NUMBER, "bytes": list_of(INTEGER)}
_LOGPROBS = list_of(record({**_SCORED, "top_logprobs": list_of(record(_SCORED))}))
_TEXT_PART = record({"type": constant("output_text"), "text": STRING, "annotations": list_of(OBJECT), "logprobs?": _LOGPROBS}, "OutputText")
_REASONING_PART = record({"type": constant("reasoning_text"), "text": STRING}, "ReasoningText")
MESSAGE_ITEM = record(
    {"id": STRING, "type": constant("message"), "role": constant("assistant"), "status": STRING, "content": list_of(_TEXT_PART)},
    "OutputMessage",
)
REASONING_ITEM = record(
    {
        "id": STRING,
        "type": constant("reasoning"),
        "status": STRING,
        "summary": list_of(OBJECT),
        "content": list_of(_REASONING_PART),
    },
    "ReasoningItem",
)
CALL_ITEM = record(
    {"id": STRING, "type": constant("function_call"), "status": STRING, "call_id": STRING, "name": STRING, "arguments": STRING},
    "FunctionCall",
)
OUTPUT_ITEM: Schema = one_of(MESSAGE_ITEM, REASONING_ITEM, CALL_ITEM)
INPUT_ITEM = record({"type?": STRING, "role?": STRING, "id?": nullable(STRING)}, "InputItem", extra=True)
_USAGE = record(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": record({"cached_tokens": INTEGER, "cache_write_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": record({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    },
    "ResponseUsage",
)
RESPONSE = record(
    {
        "id": STRING,
        "object": constant("response"),
        "created_at": INTEGER,
        "completed_at?": INTEGER,
        "status": _STATUS,
        "background": BOOLEAN,
        "error": nullable(record({"code": STRING, "message": STRING})),
        "incomplete_details": nullable(record({"reason": STRING})),
        "instructions": nullable(STRING),
        "max_output_tokens": nullable(INTEGER),
        "max_tool_calls": nullable(INTEGER),
        "metadata": map_of(STRING),
        "model": STRING,
        "output": list_of(OUTPUT_ITEM),
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": nullable(STRING),
        "prompt_cache_key": nullable(STRING),
        "reasoning": OBJECT,
        "safety_identifier": nullable(STRING),
        "service_tier": constant("default"),
        "store": BOOLEAN,
        "temperature": NUMBER,
        "text": OBJECT,
        "tool_choice": one_of(STRING, OBJECT),
        "tools": list_of(OBJECT),
        "top_logprobs": INTEGER,
        "top_p": NUMBER,
        "truncation": constant("auto", "disabled"),
        "usage": nullable(_USAGE),
        "user": nullable(STRING),
    },
    "Response",
)
_NUMBERED = {"sequence_number": INTEGER}
_IN_ITEM = {**_NUMBERED, "item_id": STRING, "output_index": INTEGER}
_IN_PART = {**_IN_ITEM, "content_index": INTEGER}
_LIFECYCLE = [f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete", "failed")]
EVENT: Schema = one_of(
    record({"type": constant(*_LIFECYCLE), **_NUMBERED, "response": RESPONSE}, "LifecycleEvent"),
    record(
        {
            "type": constant("response.output_item.added", "response.output_item.done"),
            **_NUMBERED,
            "output_index": INTEGER,
            "item": OUTPUT_ITEM,
        },
        "OutputItemEvent",
    ),
    record(
        {
            "type": constant("response.content_part.added", "response.content_part.done"),
            **_IN_PART,
            "part": one_of(_TEXT_PART, _REASONING_PART),
        },
        "ContentPartEvent",
    ),
    record({"type": constant("response.output_text.delta"), **_IN_PART, "delta": STRING, "logprobs": _LOGPROBS}, "OutputTextDelta"),
    record({"type": constant("response.output_text.done"), **_IN_PART, "text": STRING, "logprobs": _LOGPROBS}, "OutputTextDone"),
    record({"type": constant("response.reasoning_text.delta"), **_IN_PART, "delta": STRING}, "ReasoningTextDelta"),
    record({"type": constant("response.reasoning_text.done"), **_IN_PART, "text": STRING}, "ReasoningTextDone"),
    record({"type": constant("response.function_call_arguments.delta"), **_IN_ITEM, "delta": STRING}, "ArgumentsDelta"),
    record({"type": constant("response.function_call_arguments.done"), **_IN_ITEM, "name": STRING, "arguments": STRING}, "ArgumentsDone"),
)
ITEM_LIST = record(
    {
        "object": constant("list"),
        "data": list_of(INPUT_ITEM),
        "has_more": BOOLEAN,
        "first_id": nullable(STRING),
        "last_id": nullable(STRING),
    }
)
_SHAPES: dict[str, Schema] = {
    "input": one_of(STRING, {**list_of(INPUT_ITEM), "minItems": 1}),
    "tool_choice": one_of(STRING, OBJECT),
    "tools": {**list_of(record({"type": constant("function"), "name": STRING}, "FunctionTool", extra=True)), "maxItems": 128},
}
PAGE: dict[str, Schema] = {
    "order": constant("asc", "desc"),
    "after": STRING,
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
}

OPERATIONS = {
    ("POST", "/v1/responses"): Operation(
        summary="Create a response", body=table_schema(TABLE, _SHAPES, ["input"]), response=RESPONSE, stream=EVENT
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="Count the tokens of a prompt",
        body=table_schema(COUNT_TABLE, _SHAPES, ["input"]),
        response=record({"object": constant("response.input_tokens"), "input_tokens": INTEGER}),
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(summary="A stored response", response=RESPONSE),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        summary="Delete a stored response", response=record({"id": STRING, "object": constant("response"), "deleted": constant(True)})
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(summary="Cancel a response in the background", response=RESPONSE),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        summary="The input of a stored response, and the conversation before it", query=PAGE, response=ITEM_LIST
    ),
}
