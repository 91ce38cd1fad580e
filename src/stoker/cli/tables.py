"""Two-column tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table


def rows(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """A titled table of names and values; brackets in them are shown as they are, not read as markup."""
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(escape(name), escape(value))
    return table
