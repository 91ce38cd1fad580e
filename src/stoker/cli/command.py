"""Commands as rows of a table, imported when they are used: `stoker --help` reads the table alone."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from stoker.base.registry import nearest

# Without rich: its boxes cut long option names off in a terminal of 80 columns.
PLAIN: dict[str, Any] = {
    "rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 110},
}  # fmt: skip


class Command(NamedTuple):
    """One row. `target` is module:function, or module:COMMANDS for a table of further commands."""

    name: str
    target: str
    summary: str
    example: str


class Group(TyperGroup):
    """A command whose sub-commands are the rows of a table."""

    rows: ClassVar[dict[str, Command]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(self.rows[cmd_name]) if cmd_name in self.rows else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.rows and not args[0].startswith("-"):
            near = nearest(args[0], list(self.rows)) or list(self.rows)
            ctx.fail(f"No such command {args[0]!r}. Use one of: {', '.join(near)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command with its example; none is imported for it."""
        with formatter.section("Commands"):
            for row in self.rows.values():
                formatter.write_text(f"{row.name:<10} {row.summary}")
                formatter.write(f"{'':<{formatter.current_indent + 10}} $ {row.example}\n")  # whole, to be pasted


def group(name: str, rows: tuple[Command, ...], summary: str, callback: Callable[..., None] | None = None) -> Any:
    """The command of a table. `callback` holds the options that stand before the sub-command."""
    kind = type("Group", (Group,), {"rows": {row.name: row for row in rows}})
    app = typer.Typer(name=name, cls=kind, help=summary, no_args_is_help=True, **PLAIN)
    app.callback()(callback or (lambda: None))
    return typer.main.get_command(app)


def load(row: Command) -> Any:
    """The command of a row, from its module."""
    module, _, name = row.target.partition(":")
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, tuple):
        return group(row.name, found, row.summary)
    app = typer.Typer(**PLAIN)
    app.command(row.name, help=_help(row, found))(found)
    return typer.main.get_command(app)


def _help(row: Command, function: Any) -> str:
    """The function's docstring; with the row's example where it shows none. Examples are not wrapped, so that they can be pasted."""
    text = inspect.getdoc(function) or row.summary
    if not re.search(r"^ +stoker ", text, flags=re.MULTILINE):
        text = f"{text}\n\nExample:\n\n  {row.example}"
    return re.sub(r"^( +stoker )", "\b\n\\1", text, flags=re.MULTILINE)  # click leaves a paragraph that begins with \b as it is
