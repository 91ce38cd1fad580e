"""Pages for browsers: the routes of the server with their fields, and links. They load nothing from other hosts and run no script."""

from __future__ import annotations

import html
import json
import string
from importlib.resources import files
from typing import Any

from stoker.base.fields.json_schema import Schema

LINKS = (
    ("/docs", "All routes and their fields"),
    ("/openapi.json", "The same as an OpenAPI document"),
    ("/v1/models", "The served models"),
    ("/health", "Readiness"),
    ("/metrics", "Prometheus metrics"),
    ("/version", "Version"),
)


def links_page(paths: dict[str, Any]) -> bytes:
    """The page at /: links to the routes of this server, as far as `paths` contains them."""
    known = {"/docs", "/openapi.json", *paths}
    items = "".join(f'<li><a href="{path}">{path}</a> {html.escape(text)}</li>' for path, text in LINKS if path in known)
    return _page("Stoker", f"<ul>{items}</ul>")


def documentation_page(document: dict[str, Any]) -> bytes:
    """The page at /docs."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    sections = "".join(f"<h2>{html.escape(tag)}</h2>{''.join(operations)}" for tag, operations in by_tag.items())
    schemas = "".join(_component(name, schema) for name, schema in document["components"]["schemas"].items())
    info = document["info"]
    head = f"<p>Version {html.escape(info['version'])}. {html.escape(info['description'])} <a href='openapi.json'>OpenAPI document</a></p>"
    return _page("Stoker: routes", f"{head}{sections}<h2>Schemas</h2>{schemas}")


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    """A collapsed section for one route: its parameters, body and responses."""
    summary = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> {html.escape(operation['summary'])}"
    parts = []
    if parameters := operation.get("parameters"):
        rows = "".join(_row(each["name"], each["schema"], note=each["in"]) for each in parameters)
        parts.append(f"<h3>Parameters</h3><table>{rows}</table>")
    if body := operation.get("requestBody"):
        parts += [_content("Request", kind, content["schema"]) for kind, content in body["content"].items()]
    for status, response in operation["responses"].items():
        name = "Response" if status == "200" else "Error"
        parts += [_content(name, kind, content["schema"]) for kind, content in response.get("content", {}).items()]
    return f'<details id="{operation["operationId"]}"><summary>{summary}</summary>{"".join(parts)}</details>'


def _content(name: str, kind: str, schema: Schema) -> str:
    """The heading and the fields of a body. `name`: what it is; `kind`: its content type."""
    return f"<h3>{name} <small>{html.escape(kind)}</small></h3>{_schema(schema)}"


def _component(name: str, schema: Schema) -> str:
    """A collapsed section for one schema, to which the routes link."""
    return f'<details id="{html.escape(name)}"><summary><code>{html.escape(name)}</code></summary>{_schema(schema)}</details>'


def _schema(schema: Schema) -> str:
    """The HTML of a schema: a table of the members if it is an object, otherwise its type."""
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    rows = "".join(_row(name, each, note="required" if name in required else "") for name, each in schema["properties"].items())
    return f"<table>{rows}</table>"


def _row(name: str, schema: Schema, note: str) -> str:
    """A row of a table of fields: name, type, note and description."""
    description = html.escape(schema.get("description", ""))
    return f"<tr><td><code>{html.escape(name)}</code></td><td>{_type(schema)}</td><td>{note}</td><td>{description}</td></tr>"


def _type(schema: Schema) -> str:
    """The HTML of a schema's type, in one line."""
    if reference := schema.get("$ref"):
        name = html.escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema:
        return " or ".join(f"<code>{html.escape(json.dumps(value))}</code>" for value in schema["enum"] if value is not None) or "null"
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [schema[name] for name in ("minimum", "maximum") if name in schema]
    return html.escape(f"{kind} {bounds[0]} to {bounds[1]}" if len(bounds) == 2 else str(kind))


def _page(title: str, body: str) -> bytes:
    """page.html with the title and the body, which is HTML."""
    template = string.Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(title), body=body).encode()
