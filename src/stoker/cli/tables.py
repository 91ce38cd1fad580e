"""Two-column tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def rows(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """A titled table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    return table
