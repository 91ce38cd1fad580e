"""Pages of lists, as OpenAI's API returns them."""

from __future__ import annotations

import urllib.parse
from typing import Any

from stoker.base.errors import RequestError
from stoker.server.http.request_context import RequestContext


def read_query(http: RequestContext) -> dict[str, str]:
    """The parameters of the query string; the last one of equal names."""
    return dict(urllib.parse.parse_qsl(http.query.decode("latin-1")))


def list_page(items: list[dict[str, Any]], query: dict[str, str], *, max_limit: int = 100, default: int = 20) -> dict[str, Any]:
    """One page of `items`, which are oldest first, by the parameters order (default desc), after and limit. Raises RequestError."""
    order, limit = query.get("order", "desc"), query.get("limit", str(default))
    if order not in ("asc", "desc"):
        raise RequestError("order", order, "it must be asc or desc")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= max_limit:
        raise RequestError("limit", limit, f"it must be a whole number from 1 to {max_limit}")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise RequestError("after", after, "the list has no item with this id")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    ids = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, "has_more": len(page) < len(ordered), **ids}
