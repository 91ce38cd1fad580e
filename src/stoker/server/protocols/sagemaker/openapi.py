"""The operations of SageMaker's containers and of the DJL server for /openapi.json."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema, table_schema
from stoker.server.operation import BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, Operation, list_of, map_of, nullable, one_of, record
from stoker.server.protocols.sagemaker.parameters import TABLE

ERROR = record({"code": INTEGER, "type": STRING, "message": STRING}, "DJLError")
_INFERENCE_ERROR = record({"error": STRING, "code": INTEGER}, "InferenceError")
_MODEL_ERROR = record({"ErrorCode": STRING, "Message": STRING, "OriginalMessage": STRING, "OriginalStatusCode": INTEGER}, "ModelError")
_INPUTS = record(
    {
        "inputs": one_of(STRING, list_of(STRING)),
        "parameters?": nullable({"title": "InvocationParameters", **table_schema(TABLE)}),
        "stream?": nullable(BOOLEAN),
        "output_formatter?": nullable(STRING),
        "model?": nullable(STRING),
        "adapters?": nullable(STRING),
    },
    "InputsRequest",
)
_MESSAGES = record({"messages": list_of(OBJECT)}, "MessagesRequest", extra=True)
_PROMPT = record({"prompt": one_of(STRING, {"type": "array"})}, "PromptRequest", extra=True)
_BODY: Schema = one_of(_INPUTS, _MESSAGES, _PROMPT)
_TOKEN = record({"id": one_of(INTEGER, list_of(INTEGER)), "text?": STRING}, "GeneratedToken", extra=True)
_GENERATED = record({"generated_text": STRING, "details?": nullable(OBJECT)}, "GeneratedText")
_CHAT = record({"id": STRING, "object": STRING, "created": INTEGER, "choices": list_of(OBJECT), "usage?": OBJECT}, "DJLChat", extra=True)
_THIRD_PARTY = record({"body": OBJECT, "metering": map_of(NUMBER), "content_type": STRING}, "ThirdPartyRecord")
_WHOLE: Schema = one_of(_GENERATED, list_of(_GENERATED), _CHAT, _THIRD_PARTY)
_LINE: Schema = one_of(
    record({"token": _TOKEN, "generated_text?": nullable(STRING), "details?": nullable(OBJECT), "index?": INTEGER}, "TokenLine"),
    _CHAT,
    _THIRD_PARTY,
    _INFERENCE_ERROR,
)
_STATES: Schema = map_of(record({"status": STRING, "reason?": STRING}, "ModelStatus"))


def _invocation(summary: str) -> Operation:
    """The description of a route that generates."""
    return Operation(
        summary=f"Generate: {summary}",
        body=_BODY,
        response=_WHOLE,
        stream=_LINE,
        stream_type="application/jsonlines",
        error=one_of(_INFERENCE_ERROR, ERROR),
    )


_PLATFORM = Operation(
    summary="Generate, with the errors of SageMaker's runtime",
    body=_BODY,
    response=_WHOLE,
    stream=_LINE,
    stream_type="application/jsonlines",
    error=one_of(_MODEL_ERROR, ERROR),
)
_PING = Operation(summary="Readiness: status 200, 500 or 503", response=_STATES, error=_STATES)
OPERATIONS = {
    ("GET", "/ping"): _PING,
    ("POST", "/ping"): _PING,
    ("POST", "/invocations"): _invocation("the model of the container"),
    ("POST", "/predictions/{model}"): _invocation("a model by name"),
    ("POST", "/predictions/{model}/{version}"): _invocation("a model by name and version"),
    ("POST", "/models/{model}/invoke"): _invocation("a model of a multi-model endpoint"),
    ("POST", "/endpoints/{endpoint}/invocations"): _PLATFORM,
    ("POST", "/endpoints/{endpoint}/invocations-response-stream"): Operation(
        summary="Generate, as frames of an event stream of AWS",
        body=_BODY,
        response=STRING,
        response_type="application/vnd.amazon.eventstream",
        error=one_of(_MODEL_ERROR, ERROR),
    ),
    ("GET", "/models"): Operation(
        summary="The served models",
        response=record({"models": list_of(record({"modelName": STRING, "modelUrl": STRING, "status": STRING}))}),
    ),
    ("GET", "/models/{model}"): Operation(
        summary="One model with its workers", response=list_of(record({"workflowName": STRING, "models": list_of(OBJECT)}))
    ),
}
