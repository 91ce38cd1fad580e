"""`stoker cache prune`: removes what was not used for some time."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.base import env
from stoker.base.config import check_range

DEFAULT_DAYS = 30


def prune(
    days: Annotated[int, typer.Option(help="Remove entries that were not used for this number of days; 0 removes all.")] = DEFAULT_DAYS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
) -> None:
    """Remove unused engines, fetched archives, checkpoints of the demo, saved calibrations, and what killed processes left behind.

    Engines of running servers, compiled kernels, and the cache of the hub, which other programs share, are not removed.

    Examples:

      stoker cache prune --dry-run

      stoker cache prune --days 7
    """
    check_range("days", days, 0, 36500)
    from stoker.cli.output.tables import format_size
    from stoker.deploy.cache_parts import remove_entry, unused_entries
    from stoker.server.processes.running import running_servers

    entries = unused_entries(days, in_use={server.engine for server in running_servers()})
    removed = [entry for entry in entries if dry_run or remove_entry(entry)]
    for entry in removed:
        if not entry.path.startswith(str(env.cache_dir() / "digests")):  # thousands of files of 64 bytes
            typer.echo(f"{'Would remove' if dry_run else 'Removed'} {entry.path}, {format_size(entry.num_bytes)}.")
    total = format_size(sum(entry.num_bytes for entry in removed))
    typer.echo(f"{len(removed)} entries, {total} {'would be free' if dry_run else 'are free'}.")
