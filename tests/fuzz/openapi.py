"""Requests that schemathesis derives from /openapi.json, sent to the application with a scripted service.

    python tests/fuzz/openapi.py [--examples 5] [--seed 1]

Checked for each response: no failure without a reason, and a status, content type and body that the document describes for the operation.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

sys.path.append(str(Path(__file__).parents[1] / "server"))

from scripted_service import ScriptedService, make_asgi

UNEXPLAINED = "The server failed on this request"


def has_reason(context: Any, response: Any, case: Any) -> None:
    """A status above 499 is one that the server chose, such as 503 for a model that cannot be loaded, with a reason."""
    if response.status_code >= 500:
        assert response.status_code in (501, 503, 507) and UNEXPLAINED not in response.text, response.text[:500]


CHECKS = [has_reason, status_code_conformance, content_type_conformance, response_schema_conformance]


def with_lifespan(app: Any) -> Any:
    """The application with the lifespan messages of ASGI, which Stoker's own processes do not send."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await app(scope, receive, send)
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return None

    return run


def run(examples: int, seed: int) -> tuple[Counter[str], dict[str, str]]:
    """Send `examples` requests for each operation. Returns the number of requests by operation, and failures by operation."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", with_lifespan(asyncio.run(make_asgi(ScriptedService()))))
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        try:
            _send(operation, examples, seed, counts)
        except* Exception as group:
            failures[operation.label] = "\n".join(str(error) for error in group.exceptions)[:2000]
    return counts, failures


def _send(operation: Any, examples: int, seed: int, counts: Counter[str]) -> None:
    """Send requests for one operation. Raises the failures of the checks."""

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy())
    def send(case: Any) -> None:
        counts[operation.label] += 1
        case.call_and_validate(checks=CHECKS)

    send()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5, help="requests per operation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    counts, failures = run(args.examples, args.seed)
    for label, text in failures.items():
        print(f"{label}:\n{text}\n")
    print(f"{sum(counts.values())} requests for {len(counts)} operations; {len(counts) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
