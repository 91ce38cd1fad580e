"""Tables, sizes and times for the terminal."""

from __future__ import annotations

import time
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


def aligned_columns(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table for the terminal and for programs such as awk: columns are padded with spaces, and nothing is wrapped or cut."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def format_size(num_bytes: float) -> str:
    """A number of bytes with a binary unit, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"


def format_age(since: float) -> str:
    """The time since `since` (seconds since 1970) as text, such as "5 min ago"."""
    seconds = max(0.0, time.time() - since)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{int(seconds)} s ago"
