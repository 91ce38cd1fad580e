"""Probes the health endpoints of a server from a process of its own, and reports the times when its standard input ends.

    python benchmarks/chaos/health.py HOST PORT

The times contain the delays of this process on a machine with more work than cores; the overshoot of its pauses shows these.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

PAUSE_S = 0.05
LIMIT_S = 10.0
PATHS = ("/health/live", "/health/ready")


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    statuses: dict[str, int] = {}
    overshoot: list[float] = []
    number = 0
    while True:
        before = time.perf_counter()
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            break
        overshoot.append((time.perf_counter() - before - PAUSE_S) * 1e3)
        path = PATHS[number % len(PATHS)]
        number += 1
        started = time.perf_counter()
        status = probe(host, port, path)
        times[path].append((time.perf_counter() - started) * 1e3)
        statuses[f"{path} {status}"] = statuses.get(f"{path} {status}", 0) + 1
    found = {path: quantiles(values) for path, values in times.items()}
    print(json.dumps({**found, "statuses": statuses, "overshoot_ms": quantiles(overshoot)}))


def probe(host: str, port: int, path: str) -> str:
    """The status of one request over a new connection; `none` without a response."""
    try:
        with socket.create_connection((host, port), LIMIT_S) as connection:
            connection.settimeout(LIMIT_S)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n\r\n".encode())
            return connection.recv(4096)[9:12].decode() or "none"
    except OSError:
        return "none"


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in ms, and the count."""
    values = sorted(values) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(values[min(len(values) - 1, int(q * len(values)))], 2) for name, q in at.items()} | {"count": len(values)}


if __name__ == "__main__":
    main()
