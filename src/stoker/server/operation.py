"""The description of a route for /openapi.json, and the parts of which JSON schemas of responses consist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.base.fields.json_schema import NULL, Schema

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
JSON_TYPE, EVENT_TYPE, TEXT_TYPE = "application/json", "text/event-stream", "text/plain"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route. A body of None has no content; `stream` describes the data of one event, or one line, of a streamed response."""

    summary: str
    body: Schema | None = None
    body_type: str = JSON_TYPE
    body_required: bool = True
    query: Mapping[str, Schema] = {}  # parameters of the query string
    response: Schema | None = None  # of status 200
    response_type: str = JSON_TYPE
    stream: Schema | None = None
    stream_type: str = EVENT_TYPE
    error: Schema | None = None  # of every other status; None: the protocol's `error_schema`
    error_types: tuple[str, ...] = (JSON_TYPE,)


def record(members: Mapping[str, Schema], title: str = "", *, extra: bool = False) -> Schema:
    """An object with these members. A name that ends with "?" is optional; other members exist only with `extra`.

    A schema with a title becomes a component of the document.
    """
    properties = {name.removesuffix("?"): schema for name, schema in members.items()}
    required = [name for name in members if not name.endswith("?")]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if not extra:
        schema["additionalProperties"] = False
    return {"title": title, **schema} if title else schema


def list_of(schema: Schema) -> Schema:
    """The schema of an array whose items have `schema`."""
    return {"type": "array", "items": schema}


def map_of(schema: Schema) -> Schema:
    """The schema of an object with any keys, whose values have `schema`."""
    return {"type": "object", "additionalProperties": schema}


def nullable(schema: Schema) -> Schema:
    """The schema of a value that has `schema` or is null."""
    return {"anyOf": [schema, NULL]}


def one_of(*schemas: Schema) -> Schema:
    """The schema of a value that has at least one of `schemas`."""
    return {"anyOf": list(schemas)}


def constant(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}
