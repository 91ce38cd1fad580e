"""`stoker replicas`: lists and changes the replicas of a running router."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.errors import ConfigError, StokerError, UnavailableError
from stoker.cli.options import read_lines

TIMEOUT_S = 30.0


def replicas(
    router: Annotated[str, typer.Argument(help="URL of the router.")] = "http://127.0.0.1:8080",
    add: Annotated[list[str] | None, typer.Option(help="URL of a replica to add. Repeatable.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(help="URL of a replica to remove; its requests in flight continue. Repeatable.")
    ] = None,
    drain: Annotated[list[str] | None, typer.Option(help="URL of a replica that gets no new requests from now on. Repeatable.")] = None,
    resume: Annotated[list[str] | None, typer.Option(help="URL of a replica that was drained and gets requests again. Repeatable.")] = None,
    admin_key: Annotated[Path | None, typer.Option(help="A file with the admin key of the router.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the replicas of a router that was started with `stoker route`, after the changes that the options request.

    Examples:

      stoker replicas

      stoker replicas http://router:8080 --drain http://10.0.0.5:8000 --admin-key admin.key
    """
    headers = {"Content-Type": "application/json"}
    if admin_key is not None:
        headers["Authorization"] = f"Bearer {read_lines(admin_key, 'key')[0]}"
    if not router.startswith(("http://", "https://")):
        raise ConfigError(f"router={router!r} is refused.", cure="Use an address such as http://127.0.0.1:8080.")
    base = f"{router.rstrip('/')}/router/replicas"
    rows = _list(base, headers)  # first, so that nothing is sent to a server that is not a router
    for url in add or ():
        _request("POST", base, headers, {"url": url})
    for path, urls in (("drain", drain), ("resume", resume)):
        for url in urls or ():
            _request("POST", f"{base}/{path}", headers, {"url": url})
    for url in remove or ():
        _request("DELETE", f"{base}?url={urllib.parse.quote(url, safe='')}", headers)
    if add or drain or resume or remove:
        rows = _list(base, headers)
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per replica."""
    from stoker.cli.output.tables import aligned_columns

    titles = ("REPLICA", "STATE", "CIRCUIT", "REQUESTS", "OTHERS", "BLOCKS", "MODELS")
    cells = [
        (
            row["url"],
            "draining" if row["draining"] else row["health"],
            row["circuit"],
            str(row["requests_in_flight"]),
            str(row["requests_of_others"]),
            str(row["known_blocks"]),
            ", ".join(row["models"]),
        )
        for row in rows
    ]
    typer.echo("\n".join(aligned_columns(titles, cells)))


def _list(base: str, headers: dict[str, str]) -> list[dict[str, Any]]:
    """The state of each replica. Raises StokerError with the message of a router, UnavailableError if there is none."""
    rows = _request("GET", base, headers).get("replicas")
    if not isinstance(rows, list):
        raise _no_router(base, "it answers without a list of replicas")
    return rows


def _request(method: str, url: str, headers: dict[str, str], body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the router answers. Raises StokerError with its message, UnavailableError if there is no router."""
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers, method=method), timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        message = _message(error.read())
        if (method == "GET" and error.code not in (401, 403)) or message is None:
            raise _no_router(url, f"it answers {error.code} to this path") from None
        raise StokerError(f"the router answered {error.code}: {message}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _no_router(url, getattr(error, "reason", None) or str(error) or type(error).__name__) from None
    if not isinstance(answer, dict):
        raise _no_router(url, "its answer is not an object")
    return answer


def _message(body: bytes) -> str | None:
    """The message of an error of the router. None if the body is not JSON with one."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) else None


def _no_router(url: str, reason: object) -> UnavailableError:
    """The error for an address at which no router answers."""
    return UnavailableError(
        f"{url.partition('/router/')[0]} is not a router that answers: {reason}.",
        cure="Name the address of a router; start one: stoker route URL…",
    )
