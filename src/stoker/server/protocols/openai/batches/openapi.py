"""The operations of files and batches for /openapi.json."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema, table_schema
from stoker.server.operation import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Operation,
    constant,
    list_of,
    map_of,
    nullable,
    record,
)
from stoker.server.protocols.openai.batches.fields import PURPOSES, TABLE
from stoker.server.protocols.openai.batches.files import MAX_FILES

_TIME: Schema = nullable(INTEGER)
FILE = record(
    {
        "id": STRING,
        "object": constant("file"),
        "bytes": INTEGER,
        "created_at": INTEGER,
        "expires_at": _TIME,
        "filename": STRING,
        "purpose": STRING,
        "status": STRING,
    },
    "File",
)
_ERROR = record({"code": STRING, "message": STRING, "line": nullable(INTEGER), "param": nullable(STRING)})
_STATUS = constant("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
BATCH = record(
    {
        "id": STRING,
        "object": constant("batch"),
        "endpoint": STRING,
        "model": STRING,
        "errors": nullable(record({"object": constant("list"), "data": list_of(_ERROR)})),
        "input_file_id": STRING,
        "completion_window": constant("24h"),
        "status": _STATUS,
        "output_file_id": nullable(STRING),
        "error_file_id": nullable(STRING),
        "created_at": INTEGER,
        "expires_at": INTEGER,
        **dict.fromkeys(_TIMES, _TIME),
        "request_counts": record({"total": INTEGER, "completed": INTEGER, "failed": INTEGER}),
        "metadata": nullable(map_of(STRING)),
        "usage": nullable(OBJECT),
    },
    "Batch",
)
_FORM: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": constant("created_at"),
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
_REQUIRED = ["input_file_id", "endpoint", "completion_window"]


def _list(item: Schema) -> Schema:
    """The schema of a page of `item`."""
    ids = {"first_id": nullable(STRING), "last_id": nullable(STRING)}
    return record({"object": constant("list"), "data": list_of(item), "has_more": BOOLEAN, **ids})


def _page(max_limit: int) -> dict[str, Schema]:
    """The query parameters of a page."""
    return {
        "order": constant("asc", "desc"),
        "after": STRING,
        "limit": {"type": "integer", "minimum": 1, "maximum": max_limit},
    }


OPERATIONS = {
    ("POST", "/v1/files"): Operation(summary="Upload a file", body=_FORM, body_type="multipart/form-data", response=FILE),
    ("GET", "/v1/files"): Operation(summary="The stored files", query={"purpose": STRING, **_page(MAX_FILES)}, response=_list(FILE)),
    ("GET", "/v1/files/{file_id}"): Operation(summary="One file", response=FILE),
    ("DELETE", "/v1/files/{file_id}"): Operation(
        summary="Delete a file", response=record({"id": STRING, "object": constant("file"), "deleted": constant(True)})
    ),
    ("GET", "/v1/files/{file_id}/content"): Operation(
        summary="The content of a file", response=STRING, response_type="application/octet-stream"
    ),
    ("POST", "/v1/batches"): Operation(summary="Process the requests of a file", body=table_schema(TABLE, {}, _REQUIRED), response=BATCH),
    ("GET", "/v1/batches"): Operation(summary="The batches", query=_page(100), response=_list(BATCH)),
    ("GET", "/v1/batches/{batch_id}"): Operation(summary="One batch", response=BATCH),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation(summary="Cancel a batch", response=BATCH),
}
