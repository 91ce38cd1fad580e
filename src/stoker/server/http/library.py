"""The private parts of uvicorn and Starlette that this package uses, imported after a check that the installed versions have them."""

from __future__ import annotations

from stoker.base.private_api import check_private_api

check_private_api("stoker.server.http")

from starlette.routing import compile_path  # noqa: E402
from uvicorn.protocols.http.httptools_impl import (  # noqa: E402
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

__all__ = ["HEADER_RE", "HEADER_VALUE_RE", "STATUS_LINE", "HttpToolsProtocol", "RequestResponseCycle", "compile_path"]
