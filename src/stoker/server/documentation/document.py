"""The OpenAPI document of a server, assembled from the operations of its protocols."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from typing import Any

from stoker.base.fields.json_schema import Schema
from stoker.server.operation import Operation
from stoker.server.protocol import Endpoint, Protocol

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")  # of Starlette's paths: {model}, {model:path}
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]


def openapi_document(protocols: Iterable[Protocol], *, secured: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `secured`: the server requires API keys. If two protocols have a route, the first one is used and described."""
    paths: dict[str, dict[str, Any]] = {}
    components: dict[str, Schema] = {}
    for protocol in protocols:
        for endpoint in protocol.endpoints():
            operation = protocol.operations.get((endpoint.method, endpoint.path))
            if operation is not None:
                methods = paths.setdefault(_PARAMETER.sub(r"{\1}", endpoint.path), {})
                methods.setdefault(endpoint.method.lower(), _operation(protocol, endpoint, operation, components, secured))
    description = f"The routes of this server. Values of other fields are refused with status 4xx and the reason. {_SIZES}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stoker", "version": importlib.metadata.version("stoker"), "description": description},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_SIZES = "A request whose body exceeds --max-request-bytes is refused with status 413."


def _operation(
    protocol: Protocol, endpoint: Endpoint, operation: Operation, components: dict[str, Schema], secured: bool
) -> dict[str, Any]:
    """The OpenAPI description of one route. `components` receives the schemas that it refers to. `secured`: the server has API keys."""
    tag = type(protocol).__name__
    described: dict[str, Any] = {
        "tags": [tag],
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_"),
    }
    in_path = [_parameter(name, "path", {"type": "string"}) for name in _PARAMETER.findall(endpoint.path)]
    if parameters := [*in_path, *(_parameter(name, "query", schema) for name, schema in operation.query.items())]:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {operation.body_type: {"schema": _hoisted(operation.body, components)}}
        described["requestBody"] = {"required": operation.body_required, "content": content}
    described["responses"] = _responses(protocol, operation, components)
    described["security"] = _SECURITY if secured and not endpoint.open else []
    return described


def _parameter(name: str, place: str, schema: Schema) -> dict[str, Any]:
    """The OpenAPI description of a parameter in `place`: path or query. Parameters of the path are required."""
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(protocol: Protocol, operation: Operation, components: dict[str, Schema]) -> dict[str, Any]:
    """The descriptions of the response with status 200, and of errors. `components` receives the schemas that they refer to."""
    content = {}
    if operation.response is not None:
        content[operation.response_type] = {"schema": _hoisted(operation.response, components)}
    if operation.stream is not None:
        content[operation.stream_type] = {"schema": _hoisted(operation.stream, components)}
    error = operation.error if operation.error is not None else protocol.error_schema
    error_content = {kind: {"schema": _hoisted(error, components)} for kind in operation.error_types}
    success = {"description": "success", **({"content": content} if content else {})}
    return {"200": success, "default": {"description": "an error", "content": error_content}}


def _hoisted(schema: Any, components: dict[str, Schema]) -> Any:
    """The schema, in which references replace the parts that have a title. Raises ValueError if two different parts have one title.

    The replaced parts are added to `components` under their titles.
    """
    if isinstance(schema, list):
        return [_hoisted(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _hoisted(value, components) for name, value in schema.items()}
    title = schema.get("title")
    if not isinstance(title, str):
        return inner
    if components.setdefault(title, inner) != inner:
        raise ValueError(f"two schemas have the title {title}")
    return {"$ref": f"#/components/schemas/{title}"}
