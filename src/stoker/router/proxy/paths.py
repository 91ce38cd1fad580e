"""What the router does with each path: which replicas a request may go to, and whether it may be repeated."""

from __future__ import annotations

import enum
import re


class Kind(enum.Enum):
    """How requests of a path are forwarded."""

    GENERATE = "to the replica with the prefix; repeated if a replica fails"
    ANY = "to any replica; repeated if a replica fails"
    OWNED = "to the replica that stores the object in the path or the body"
    HOME = "to the replica that stores files and batches"
    ALL = "to all replicas"


class PathKind:
    """The kind of a path, and the id of the stored object in it."""

    def __init__(self, kind: Kind, object_path: str = "") -> None:
        self.kind = kind
        self.object_path = object_path  # GET of this path answers 200 on the replica that stores the object


_OBJECT = re.compile(r"/v1/(responses|files|batches)/[^/]+")
_LISTS = ("/v1/files", "/v1/batches")
_CONTROL = re.compile(
    r"/v2/(repository/models/[^/]+/(load|unload)|logging|(system|cuda)sharedmemory/.*(register|unregister)|(.*/)?trace/setting)"
)
_NO_GENERATION = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v2/repository/index", "/ping", "/api/show")
CREATED_ID = re.compile(rb'"id":\s*"((?:resp|file|batch)[-_][\w-]{1,128})"')
CREATED_BYTES = 4096  # of a response, within which its id is


def kind_of(method: str, path: str) -> PathKind:
    """How a request with this method and path is forwarded."""
    if match := _OBJECT.match(path):
        return PathKind(Kind.OWNED, match[0])
    if path in _LISTS:
        return PathKind(Kind.HOME)
    if method == "POST" and _CONTROL.fullmatch(path):
        return PathKind(Kind.ALL)
    if method == "POST" and path not in _NO_GENERATION:
        return PathKind(Kind.GENERATE)
    return PathKind(Kind.ANY)


def referenced_object(path: str, body: dict[str, object]) -> str:
    """The path of the stored object that the body of a request refers to; empty if there is none."""
    for name, folder, of in (("previous_response_id", "responses", "/v1/responses"), ("input_file_id", "files", "/v1/batches")):
        value = body.get(name)
        if path == of and isinstance(value, str) and re.fullmatch(r"[\w-]{1,128}", value):
            return f"/v1/{folder}/{value}"
    return ""
