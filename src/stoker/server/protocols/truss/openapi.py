"""The operations of a Truss model server for /openapi.json."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema, table_schema
from stoker.server.operation import OBJECT, STRING, Operation, constant, one_of, record
from stoker.server.protocols.truss.parameters import TABLE

ERROR: Schema = one_of(record({"error": STRING}, "TrussError"), record({"detail": STRING}, "TrussDetail"))
_LEGACY: Schema = {"title": "PredictRequest", **table_schema(TABLE)}
_OPENAI = record({"model?": STRING, "messages?": {"type": "array"}, "prompt?": one_of(STRING, {"type": "array"})}, "OpenAIBody", extra=True)
_PREDICT = Operation(
    summary="Generate: the fields of the first Truss releases, or a request of OpenAI's API",
    body=one_of(_LEGACY, _OPENAI),
    response=one_of(record({"text": STRING}, "PredictedText"), STRING, OBJECT),
    stream=STRING,
    stream_type="application/octet-stream",
)
_EMPTY = record({})

OPERATIONS = {
    ("POST", "/v1/models/{model}:predict"): _PREDICT,
    ("POST", "/v1/models/{model}:predict_binary"): _PREDICT,
    ("GET", "/"): Operation(summary="Liveness", response=constant(True)),
    ("GET", "/ping"): Operation(summary="Whether the model is loaded: status 200 or 503", response=_EMPTY),
    ("GET", "/v1/models/{model}"): Operation(summary="Readiness: status 200 or 503", response=_EMPTY),
    ("GET", "/v1/models/{model}/loaded"): Operation(summary="Whether the model is loaded: status 200 or 503", response=_EMPTY),
    ("GET", "/v1/models/{model}/schema"): Operation(summary="Always status 404: there is no schema"),
    ("POST", "/invocations"): _PREDICT,
    **{
        ("POST", f"/v1/{name}"): Operation(summary="Always status 404: the model has no such method")
        for name in ("embeddings", "messages", "responses")
    },
}
