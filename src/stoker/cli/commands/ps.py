"""`stoker ps`: the servers that run on this machine."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from stoker.server.processes.running import RunningServer

TIMEOUT_S = 2.0


def ps(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the servers of this machine that use the same cache directory, with their addresses and states.

    Examples:

      stoker ps

      stoker ps --json
    """
    from concurrent.futures import ThreadPoolExecutor

    from stoker.server.processes.running import running_servers

    servers = running_servers()
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(_state, servers))
    if as_json:
        rows: list[dict[str, Any]] = [
            {**msgspec.structs.asdict(server), "state": state} for server, state in zip(servers, states, strict=True)
        ]
        typer.echo(msgspec.json.encode(rows))
    elif not servers:
        typer.echo("No server is running. Start one: stoker serve MODEL.", err=True)
    else:
        _print_table(servers, states)


def _print_table(servers: list[RunningServer], states: list[str]) -> None:
    """Print one line per server."""
    from stoker.cli.output.tables import aligned_columns, format_age

    rows = [(s.model, s.url, state, str(s.pid), format_age(s.started_at)) for s, state in zip(servers, states, strict=True)]
    typer.echo("\n".join(aligned_columns(("MODEL", "ADDRESS", "STATE", "PID", "STARTED"), rows)))


def _state(server: RunningServer) -> str:
    """The state of a server: ready, not ready (it is loading, draining, or a step hangs), or silent when it does not answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only the status is read, and nothing is sent
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{server.url}/health/ready", timeout=TIMEOUT_S):
            return "ready"
    except urllib.error.HTTPError:
        return "not ready"
    except OSError:
        return "silent"
