"""JSON schemas of value types and field tables, so that published schemas and the parser of requests cannot differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from stoker.base.fields.table import FieldRow, FieldTable
from stoker.base.fields.values import Anything, Choice, Flag, Line, ListOf, MappingOf, Real, Text, ValueType, Whole

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}


def value_schema(kind: ValueType) -> Schema:
    """The schema of the JSON values that a value type accepts. Raises TypeError for a type that has none."""
    match kind:
        case Whole():
            number = {"type": "integer", "minimum": kind.low, "maximum": kind.high}
            return {"anyOf": [number, {"enum": list(kind.words)}]} if kind.words else number
        case Real():
            return {"type": "number", "exclusiveMinimum" if kind.above else "minimum": kind.low, "maximum": kind.high}
        case Flag():
            return {"type": "boolean"}
        case Text():
            return {"type": "string", "maxLength": kind.max_chars}
        case Line():
            return {"type": "string"}
        case Choice():
            return {"enum": list(kind.meanings)}
        case Anything():
            return {}
        case ListOf():
            item = value_schema(kind.item)
            items = {"type": "array", "items": item, "maxItems": kind.max_items}
            return {"anyOf": [items, item]} if kind.or_one else items
        case MappingOf():
            return {"type": "object", "additionalProperties": value_schema(kind.values)}
    raise TypeError(f"{type(kind).__name__} has no JSON schema")


def table_schema(table: FieldTable[FieldRow], shapes: Mapping[str, Schema] | None = None, required: Collection[str] = ()) -> Schema:
    """The schema of an object with the fields of a table.

    `shapes` holds schemas of fields that are more precise than the type of their row. A rejected field may have its harmless values only.
    """
    shapes = shapes or {}
    properties = {row.name: _row_schema(row, shapes.get(row.name), nullable=row.name not in required) for row in table}
    return {"type": "object", "properties": properties, "required": sorted(required), "additionalProperties": False}


def _row_schema(row: FieldRow, shape: Schema | None, *, nullable: bool) -> Schema:
    """The schema of one field. `shape` replaces the schema of its type.

    With `nullable`, null is also valid, because it counts as absent.
    """
    if row.status == "rejected":
        allowed = {"enum": [*row.harmless, None]}
        return {**allowed, "description": f"Rejected: {row.reason}. {row.alternative}".strip(), "deprecated": True}
    text = row.meaning if row.status == "accepted" else f"no effect: {row.reason}"
    described = {"description": text[:1].upper() + text[1:] + "."} if text else {}
    schema = shape if shape is not None else value_schema(row.type)
    if not schema:
        return described
    return {**({"anyOf": [schema, NULL]} if nullable else schema), **described}
