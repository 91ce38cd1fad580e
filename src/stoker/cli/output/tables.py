"""Two-column tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table


def name_value_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A titled table of names and values. Text in brackets is shown as it is and not interpreted as rich markup."""
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table
