"""Errors with the names of the fields that a client sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import RequestError


def with_client_name(error: RequestError, names: Mapping[str, str], body: Mapping[str, Any]) -> RequestError:
    """The error with the name and value of the field that the client sent. `names` maps Stoker's own names to those of the API."""
    sent = names.get(error.field)
    if sent is None or error.field in body:
        return error
    return RequestError(sent, body.get(sent, error.value), error.limit, cure=error.cure)
