"""One request of a client on its way to a replica, and what the access log reports about it."""

from __future__ import annotations

import time

from stoker.router.core.policy import Route
from stoker.router.core.replica import Replica
from stoker.server.http.request_context import RequestContext


class Forwarded:
    """One request of a client. The attributes are for the access log."""

    def __init__(self, http: RequestContext, path: str, target: str, body: bytes) -> None:
        self.http, self.path, self.target, self.body = http, path, target, body
        self.started_s = time.monotonic()
        self.route = Route()
        self.replica: Replica | None = None  # the last one that the request was sent to
        self.num_attempts = 0
        self.num_cached = 0
        self.prefill: Replica | None = None  # the one that computes the prompt, if it is another one
        self.first_byte_s: float | None = None
        self.num_bytes = 0
        self.error = ""
