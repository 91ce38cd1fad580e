"""`stoker cache size`: the parts of the cache directory with their sizes."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from stoker.base import env


def size(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Show what the cache directory contains. STOKER_CACHE names another directory.

    Examples:

      stoker cache size

      stoker cache size --json
    """
    from stoker.cli.output.tables import aligned_columns, format_size
    from stoker.deploy.cache_parts import cache_parts

    parts = cache_parts()
    if as_json:
        typer.echo(msgspec.json.encode(parts))
        return
    rows = [(part.name, format_size(part.num_bytes), str(part.num_entries), part.description) for part in parts]
    rows.append(("total", format_size(sum(part.num_bytes for part in parts if part.is_own)), "", f"in {env.cache_dir()}"))
    typer.echo("\n".join(aligned_columns(("PART", "SIZE", "ENTRIES", "CONTENT"), rows)))
