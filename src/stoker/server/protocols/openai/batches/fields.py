"""The table of request fields of POST /v1/batches."""

from __future__ import annotations

from stoker.base.fields.table import FieldTable, accepted
from stoker.base.fields.values import MappingOf, Text, exactly

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
TABLE = FieldTable(
    (
        accepted("input_file_id", Text(128), "an uploaded file with one request per line"),
        accepted("endpoint", exactly(*URLS), "the url of all requests of the file"),
        accepted("completion_window", exactly("24h"), "requests that are not processed then are reported as expired"),
        accepted("metadata", MappingOf(Text(64), Text(512)), "at most 16 strings, returned with the batch"),
        accepted("output_expires_after", MappingOf(), 'when results are deleted: {"anchor": "created_at", "seconds": …}; default never'),
    )
)
PURPOSES = ("batch", "user_data")
