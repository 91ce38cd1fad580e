"""Checks JSON schemas: keywords that the compiled grammar would not enforce are rejected by name.

The lists result from a test of each keyword of draft 2020-12 with xgrammar 0.2. Keywords that are only annotations are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

MAX_DEPTH = 64  # the compilation time grows with the square of the depth; 0.03 s for this depth
# With 128,000 tokens, an enum of 8,000 values takes 0.15 s and 1 MB; one of 16,000 takes 2 s and 40 MB.
MAX_VALUES = 10_000  # of an enum, or the strings of a choice
MAX_NODES = 50_000  # JSON values of a schema, those inside objects and lists included

NOT_ENFORCED = (
    "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies", "not", "if", "then", "else",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
OF_STRINGS = ("minLength", "maxLength", "pattern")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties", "maxProperties")
OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
EXCLUSIVE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # constraints beside one of these would be ignored
CONSTRAINTS = frozenset(("type", *OF_STRINGS, *OF_NUMBERS, *OF_OBJECTS, *OF_ARRAYS, *EXCLUSIVE))
TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def check_schema(text: str) -> None:
    """Raise ValueError if the schema has a constraint that the grammar does not enforce. The message has its path and keyword."""
    schema = json.loads(text)
    check_size(schema)
    if isinstance(schema, dict):
        _check(schema, "#", schema)


def check_size(value: Any) -> None:
    """Raise ValueError if objects and lists are nested deeper than MAX_DEPTH, or exceed MAX_NODES or MAX_VALUES."""
    level: list[Any] = [[value]]  # so that `value` itself is the first child
    depth, nodes = -1, 0
    while level := [child for node in level for child in _children(node)]:
        depth, nodes = depth + 1, nodes + sum(map(len, level))
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} JSON values")
        sizes = [len(node["enum"]) for node in level if isinstance(node, dict) and isinstance(node.get("enum"), list)]
        if max(sizes, default=0) > MAX_VALUES:
            raise ValueError(f"an enum has {max(sizes)} values, and may have {MAX_VALUES}")


def _children(node: Any) -> Iterator[Any]:
    """The objects and lists that are direct values of `node`."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (child for child in inner if isinstance(child, (dict, list)))


def _check(schema: dict[str, Any], path: str, root: dict[str, Any]) -> None:
    """Raise ValueError for the first constraint of a schema or its subschemas that is not enforced.

    `path` is that of `schema` in `root`.
    """
    for key in NOT_ENFORCED:
        if key in schema:
            raise ValueError(f"{path}/{key}: {key} is not enforced")
    if schema.get("uniqueItems"):
        raise ValueError(f"{path}/uniqueItems: unique items are not enforced")
    _check_ref(schema, path)
    _check_exclusive_keys(schema, path)
    _check_typed(schema, path)
    missing = set(schema.get("required") or ()) - set(schema.get("properties") or ())
    if missing:
        raise ValueError(f"{path}/required: {sorted(missing)[0]!r} is not among the properties")
    if isinstance(schema.get("oneOf"), list):
        _check_one_of(schema["oneOf"], path, root)
    for inner_path, inner in _subschemas(schema, path):
        _check(inner, inner_path, root)


def _check_ref(schema: dict[str, Any], path: str) -> None:
    """Raise ValueError for a $ref that does not point into the same schema."""
    ref = schema.get("$ref", "#")
    if not (isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))):
        raise ValueError(f"{path}/$ref: {ref!r} is not a path in this schema (#/…)")


def _check_exclusive_keys(schema: dict[str, Any], path: str) -> None:
    """Raise ValueError for constraints that xgrammar ignores beside a keyword such as anyOf, and for allOf with several schemas."""
    for key in EXCLUSIVE:
        if key not in schema:
            continue
        others = (CONSTRAINTS & schema.keys()) - {key}
        if others == {"type"} and _is_implied(schema, key):
            continue
        if others:
            raise ValueError(f"{path}/{sorted(others)[0]}: it is not enforced beside {key}")
    if len(schema.get("allOf", ())) > 1:
        raise ValueError(f"{path}/allOf: more than one schema is not enforced")


def _is_implied(schema: dict[str, Any], key: str) -> bool:
    """Whether `type` beside the keyword `key` excludes no further value."""
    kinds = _types(schema)
    if key in ("const", "enum"):
        return all(_is_of(value, kinds) for value in (schema["enum"] if key == "enum" else [schema["const"]]))
    branches = schema[key] if isinstance(schema[key], list) else []
    return bool(branches) and all(isinstance(branch, dict) and "type" in branch and _types(branch) <= kinds for branch in branches)


def _check_typed(schema: dict[str, Any], path: str) -> None:
    """Raise ValueError for keywords of strings or numbers in a schema of another type, and for lengths beside a pattern or format."""
    for keys, kinds in ((OF_STRINGS, {"string"}), (OF_NUMBERS, {"number", "integer"})):
        for key in keys:
            if key in schema and not kinds & _types(schema):
                raise ValueError(f"{path}/{key}: it needs type {' or '.join(sorted(kinds))}")
    for key in ("pattern", "format"):
        if key in schema and ("minLength" in schema or "maxLength" in schema):
            raise ValueError(f"{path}/{key}: lengths are not enforced beside it")


def _check_one_of(branches: list[Any], path: str, root: dict[str, Any]) -> None:
    """Raise ValueError if two branches of a oneOf may match the same value.

    The grammar treats oneOf as anyOf, which gives the same answers only if branches are disjoint.
    """
    resolved = [_resolve(branch, root) for branch in branches]
    for (i, one), (j, other) in combinations(enumerate(resolved), 2):
        if not _disjoint(one, other):
            raise ValueError(f"{path}/oneOf: branches {i} and {j} may both match; use anyOf")


def _disjoint(one: Any, other: Any) -> bool:
    """Whether it is certain that no value matches both schemas."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if not _widened(one) & _widened(other):
        return True
    values = [_values(schema) for schema in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    shared = set(one.get("required") or ()) & set(other.get("required") or ())
    return any(_disjoint((one.get("properties") or {}).get(name), (other.get("properties") or {}).get(name)) for name in shared)


def _resolve(schema: Any, root: dict[str, Any]) -> Any:
    """The schema that a chain of $ref points to in `root`; None if it does not exist."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        found: Any = root
        for part in schema["$ref"].split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return None


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values that const or enum allow, as JSON texts; None without these keywords."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    """The names in the keyword `type`; empty without it."""
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else {name for name in kind if isinstance(name, str)} if isinstance(kind, list) else set()


def _widened(schema: dict[str, Any]) -> set[str]:
    """The types that a value may have, where an integer counts as a number."""
    kinds = _types(schema) or {*TYPES, "number"}
    return {"number" if kind == "integer" else kind for kind in kinds}


def _is_of(value: Any, kinds: set[str]) -> bool:
    """Whether a JSON value has one of the types `kinds`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number" in kinds or ("integer" in kinds and float(value).is_integer())
    return any(isinstance(value, TYPES[kind]) for kind in kinds if kind in TYPES)


def _subschemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, subschema) of each subschema directly inside `schema`."""
    for key in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if isinstance(schema.get(key), dict):
            yield f"{path}/{key}", schema[key]
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            yield from ((f"{path}/{key}/{name}", inner) for name, inner in schema[key].items() if isinstance(inner, dict))
    for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            yield from ((f"{path}/{key}/{i}", inner) for i, inner in enumerate(schema[key]) if isinstance(inner, dict))
