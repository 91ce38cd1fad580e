"""Triton's trace settings, which clients read."""

from __future__ import annotations

from typing import Any

from stoker.server.protocols.kserve.errors import TritonError

TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


def check_trace(requested: dict[str, Any]) -> dict[str, Any]:
    """The trace settings, which cannot be changed. Raises TritonError for other values, because requests are not traced."""
    for name, value in requested.items():
        if name not in TRACE:
            raise TritonError(f"Unknown trace setting '{name[:80]}'. Known: {', '.join(TRACE)}.")
        if value not in (None, TRACE[name], [TRACE[name]], "OFF"):
            raise TritonError(f"trace setting '{name}' cannot be changed: requests are not traced. See the metrics for durations.")
    return TRACE
