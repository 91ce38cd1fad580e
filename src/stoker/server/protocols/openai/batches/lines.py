"""The lines of batch files: requests, which are checked, and results."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.server.errors import BodyError, Failure
from stoker.server.http.json_body import decode_json
from stoker.server.protocols.openai import response_json as wire

MAX_LINES = 50_000  # of a batch, as in OpenAI's API
MAX_ERRORS = 100  # that are reported for one file
MAX_ID_CHARS = 512


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(msgspec.Struct, frozen=True):
    """A line that is not a request. `line` counts from 1."""

    code: str
    message: str
    line: int
    param: str | None = None


class BatchLinesError(StokerError):
    """A batch file has lines that are not requests."""

    status = 400
    code = "invalid_batch"

    def __init__(self, errors: list[LineError]) -> None:
        self.errors = errors
        first = errors[0]
        super().__init__(f"line {first.line}: {first.message}", cure=f"{len(errors)} lines are wrong." if len(errors) > 1 else "")


def read_batch_lines(data: bytes, urls: Collection[str]) -> list[BatchLine]:
    """The requests of a batch file; empty lines are skipped. Raises BatchLinesError with at most MAX_ERRORS errors."""
    lines: list[BatchLine] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, text in enumerate(io.BytesIO(data), 1):
        if not text.strip():
            continue
        if len(lines) == MAX_LINES:
            errors.append(LineError("too_many_requests", f"a batch has at most {MAX_LINES} requests.", number))
            break
        found = _read_line(text, number, urls, seen)
        if isinstance(found, BatchLine):
            seen.add(found.custom_id)
            lines.append(found)
        else:
            errors.append(found)
            if len(errors) == MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(LineError("empty_file", "the file has no requests.", 1))
    if errors:
        raise BatchLinesError(errors)
    return lines


def _read_line(text: bytes, number: int, urls: Collection[str], seen: set[str]) -> BatchLine | LineError:
    """The request in a line, or why it is not one. `urls`: the allowed routes; `seen`: the custom_ids of the lines before, which grows."""
    try:
        value = decode_json(text)
    except BodyError as error:
        return LineError("invalid_json_line", error.message, number)
    if not isinstance(value, dict):
        return LineError("invalid_json_line", "the line is not a JSON object.", number)
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return LineError("invalid_custom_id", f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters.", number, "custom_id")
    if custom_id in seen:
        return LineError("duplicate_custom_id", f"custom_id {custom_id[:80]!r} is used twice.", number, "custom_id")
    if value.get("method", "POST") != "POST":
        return LineError("invalid_method", "method must be POST.", number, "method")
    if not isinstance(url, str) or url not in urls:
        return LineError("invalid_url", f"url must be {' or '.join(sorted(urls))}.", number, "url")
    if not isinstance(body, dict):
        return LineError("invalid_body", "body must be an object.", number, "body")
    for name in ("stream", "background"):
        if body.get(name):
            return LineError("invalid_body", f"{name} must be false in a batch.", number, f"body.{name}")
    return BatchLine(custom_id, url, body)


class LineResult(msgspec.Struct, frozen=True):
    """The result of one request, as a line of an output or error file."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: dict[str, Any] | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the request has a response with status 200."""
        return self.response is not None and self.response["status_code"] == 200

    def encode(self) -> bytes:
        """The line, with its end."""
        return msgspec.json.encode(self) + b"\n"


def response_result(line: BatchLine, status: int, request_id: str, body: dict[str, Any] | msgspec.Raw) -> LineResult:
    """The result of a request that has a response, with any status. `body` is an object, or its JSON."""
    return LineResult(_new_id(), line.custom_id, {"status_code": status, "request_id": request_id, "body": body})


def failed_result(line: BatchLine, failure: Failure, request_id: str) -> LineResult:
    """The result of a request that was refused or failed."""
    return response_result(line, failure.status, request_id, {"error": wire.failure_object(failure)})


def unanswered_result(line: BatchLine, code: str, message: str) -> LineResult:
    """The result of a request that was not processed."""
    return LineResult(_new_id(), line.custom_id, None, {"code": code, "message": message})


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a result file. Raises ValueError for a line that is not a result, except for a last one that is not complete."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            value = json.loads(line)
            if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
                raise ValueError(f"line {number} is not a result")
            yield value


def finished_ids(path: Path) -> set[str]:
    """The custom ids of a result file, from which a last line that is not complete is removed. Raises ValueError for another line."""
    if not path.exists():
        return set()
    ids = {result["custom_id"] for result in read_results(path)}
    with path.open("r+b") as file:
        size = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(size)
    return ids


def _new_id() -> str:
    """A new id for a result."""
    return f"batch_req_{uuid.uuid4().hex}"
