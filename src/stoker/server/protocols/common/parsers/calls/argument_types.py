"""JSON values of arguments that a model writes as plain text. The JSON schema of the parameter decides between text and other values."""

from __future__ import annotations

import json
from typing import Any

from stoker.server.protocols.common.parsers.tools.parser import read_json, valid_unicode

MAX_DEPTH = 8
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # some chat templates write values of earlier calls with these


def parameter_types(schema: dict[str, Any], name: str) -> set[str]:
    """The JSON types that the schema of a function allows for the parameter `name`. Empty: the schema does not say."""
    properties = schema.get("properties")
    return _types(properties.get(name), schema, MAX_DEPTH) if isinstance(properties, dict) else set()


def json_of_text(text: str, types: set[str]) -> str:
    """The JSON text of an argument. Text that is not JSON, or is JSON of no allowed type, is a string."""
    word = _PYTHON_WORDS.get(text.strip(), text)
    try:
        value = read_json(word)
        is_json = value is not None or word.strip() == "null"
        if is_json and (not types or types & _types_of(value)):
            return valid_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (RecursionError, ValueError):  # nested too deeply, or NaN
        pass
    return json_string(text)


def json_string(text: str) -> str:
    """The text as a JSON string, with quotation marks and escapes."""
    return valid_unicode(json.dumps(text, ensure_ascii=False))


def _types_of(value: Any) -> set[str]:
    """The JSON types to which a decoded value belongs. A whole number is an integer and a number."""
    if value is None or isinstance(value, bool):
        return {"null"} if value is None else {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    return {{float: "number", str: "string", list: "array", dict: "object"}[type(value)]}


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    """The JSON types that the schema allows, with its references resolved in `root`, at most `depth` levels deep. Empty: any."""
    if not isinstance(schema, dict) or not depth:
        return set()
    if (kind := schema.get("type")) is not None:
        return {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return set().union(*(_types_of(value) for value in values))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(word), list):
            kinds = [_types(option, root, depth - 1) for option in options]
            return set().union(*kinds) if all(kinds) else set()
    return _types(_referenced(schema.get("$ref"), root), root, depth - 1)


def _referenced(reference: Any, root: dict[str, Any]) -> Any:
    """The schema at a reference such as #/$defs/NAME."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    value: Any = root
    for key in reference.removeprefix("#/").split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value
