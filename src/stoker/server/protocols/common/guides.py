"""Guided decoding: the fields of all protocols that constrain the answer to a grammar, converted to one `Guide`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import ListOf, Text
from stoker.base.registry import nearest
from stoker.base.types import Guide

CHOICE_LIST = ListOf(Text(1 << 16), 1024)
KIND_OF_FIELD = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
}
OBJECT_GUIDE = Guide("json_schema", '{"type": "object"}')  # JSON mode: any object, but no other JSON value
KIND_OF_OUTPUT = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "structural_tag": "structural_tag"}


def read_guide(values: dict[str, Any]) -> Guide | None:
    """The grammar that a request sets in any of these fields. Raises RequestError if it sets more than one."""
    guides = {name: _guide(kind, name, values[name]) for name, kind in KIND_OF_FIELD.items() if name in values}
    if "response_format" in values and (guide := _response_format(values["response_format"])) is not None:
        guides["response_format"] = guide
    if "structured_outputs" in values:
        guides["structured_outputs"] = _structured_outputs(values["structured_outputs"])
    if len(guides) > 1:
        raise RequestError(list(guides)[1], values[list(guides)[1]], f"{next(iter(guides))} is set too", cure="Use one of them.")
    return next(iter(guides.values()), None)


def guide_field(values: Mapping[str, Any]) -> str:
    """The name of the field from which `read_guide` takes the grammar. Empty if no field sets one."""
    name = next((name for name in (*KIND_OF_FIELD, "response_format", "structured_outputs") if values.get(name) is not None), "")
    inner = values[name] if name in ("response_format", "structured_outputs") and isinstance(values[name], dict) else {}
    if name == "response_format" and inner.get("type") == "json_schema":
        return "response_format.json_schema"
    members = [member for member, value in inner.items() if value is not None and value is not False]
    return f"{name}.{members[0]}" if name == "structured_outputs" and len(members) == 1 else name


def _guide(kind: str, name: str, value: Any) -> Guide:
    """The guide of one field. A JSON schema may be an object, true, false, or JSON text."""
    if kind == "choice":
        try:
            choices = CHOICE_LIST.check(list(value) if isinstance(value, tuple) else value)
        except InvalidValueError as error:
            raise error.request_error(name) from None
        if not choices:
            raise RequestError(name, value, "it must list at least one string")
        return Guide("choice", msgspec.json.encode(choices).decode())
    if (kind == "json_schema" and isinstance(value, (dict, bool))) or (kind == "structural_tag" and isinstance(value, dict)):
        return Guide(kind, msgspec.json.encode(value).decode())
    if not isinstance(value, str):
        raise RequestError(name, value, "it must be a string" if kind != "json_schema" else "it must be a JSON schema")
    return Guide(kind, value)


def _response_format(value: dict[str, Any]) -> Guide | None:
    """The guide of OpenAI's response_format; None for plain text."""
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return OBJECT_GUIDE
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema", inner.get("json_schema")), (dict, bool)):
                raise RequestError("response_format.json_schema", inner, 'it must be {"name": …, "schema": {…}}')
            return _guide("json_schema", "response_format", inner.get("schema", inner.get("json_schema")))
        case "structural_tag":
            return _guide("structural_tag", "response_format", value)
    raise RequestError("response_format.type", value.get("type"), "it must be text, json_object, json_schema or structural_tag")


def _structured_outputs(value: dict[str, Any]) -> Guide:
    """The guide of vLLM's structured_outputs."""
    outputs = {name: item for name, item in value.items() if item is not None and item is not False}
    for name in outputs:
        if name not in KIND_OF_OUTPUT and name != "json_object":
            near = nearest(name, [*KIND_OF_OUTPUT, "json_object"])
            raise RequestError(
                f"structured_outputs.{name}", outputs[name], "there is no such field", cure=f"Did you mean {near[0]}?" if near else ""
            )
    if len(outputs) != 1:
        raise RequestError("structured_outputs", value, f"it must hold one of {', '.join(KIND_OF_OUTPUT)}, json_object")
    name, item = next(iter(outputs.items()))
    return OBJECT_GUIDE if name == "json_object" else _guide(KIND_OF_OUTPUT[name], f"structured_outputs.{name}", item)
