"""`stoker replicas`: lists and changes the replicas of a running router."""

from __future__ import annotations

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
    for url in add or ():
        _request("POST", base, headers, {"url": url})
    for path, urls in (("drain", drain), ("resume", resume)):
        for url in urls or ():
            _request("POST", f"{base}/{path}", headers, {"url": url})
    for url in remove or ():
        _request("DELETE", f"{base}?url={urllib.parse.quote(url, safe='')}", headers)
    rows = _request("GET", base, headers)["replicas"]
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


def _request(method: str, url: str, headers: dict[str, str], body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the router answers. Raises StokerError with its message."""
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers, method=method), timeout=TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise StokerError(f"the router answered {error.code}: {error.read()[:500].decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{url} does not answer as a router: {error}.", cure="Start one: stoker route URL…") from None
