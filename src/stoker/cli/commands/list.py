"""`stoker list`: the engines in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

if TYPE_CHECKING:
    from stoker.deploy.cached_engines import CachedEngine


def list_engines(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the engines that `pull`, `serve` and other commands have built, the most recently used first.

    A name or id of this list can be used as MODEL of other commands.

    Examples:

      stoker list

      stoker list --json
    """
    from stoker.deploy.cached_engines import cached_engines

    engines = cached_engines()
    if as_json:
        typer.echo(msgspec.json.encode(engines))
    elif not engines:
        typer.echo("No engine is cached. Build one: stoker pull MODEL.", err=True)
    else:
        _print_table(engines)


def _print_table(engines: list[CachedEngine]) -> None:
    """Print one line per engine."""
    from stoker.cli.output.tables import aligned_columns, format_age, format_size

    rows = [(e.name, e.id, format_size(e.num_bytes), f"{e.quantization}, {e.dtype}", e.device, format_age(e.used_at)) for e in engines]
    typer.echo("\n".join(aligned_columns(("NAME", "ID", "SIZE", "QUANTIZATION", "DEVICE", "LAST USED"), rows)))
