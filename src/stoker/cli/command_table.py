"""Turns tables of commands into a command line. A command's module is imported when the command runs, so `stoker --help` stays fast."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from stoker.base.registry import nearest

# rich's help boxes cut long option names off in a terminal of 80 columns, so the plain formatter is used.
APP_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 110},
}  # fmt: skip
EXAMPLES_HEADING = "Examples:"
USAGE_ERROR: type[Any] = typer.BadParameter.__bases__[0]  # of arguments that the parser refuses; Typer exports only this subclass


class Command(NamedTuple):
    """One row of a command table.

    `target` is "module:function", or "module:COMMANDS" for a table of sub-commands. `example` is shown in the table's help and is one of
    the examples in the function's docstring.
    """

    name: str
    target: str
    summary: str
    example: str


class CommandGroup(TyperGroup):
    """A command whose sub-commands are the rows of a table."""

    rows: ClassVar[dict[str, Command]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Print the help if there are no arguments."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(self.rows[cmd_name]) if cmd_name in self.rows else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.rows and not args[0].startswith("-"):
            near = nearest(args[0], list(self.rows)) or list(self.rows)
            ctx.fail(f"No such command {args[0]!r}. Use one of: {', '.join(near)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each row's summary and example, without importing the command."""
        width = max(map(len, self.rows))
        with formatter.section("Commands"):
            for row in self.rows.values():
                formatter.write_text(f"{row.name:<{width}} {row.summary}")
                # Written without wrapping, so that the line can be copied.
                formatter.write(f"{'':<{formatter.current_indent + width}} $ {row.example}\n")


def command_group(name: str, rows: tuple[Command, ...], summary: str, callback: Callable[..., None] | None = None) -> Any:
    """The click command of a table. `callback` declares the options that are given before the sub-command."""
    group_class = type("CommandGroup", (CommandGroup,), {"rows": {row.name: row for row in rows}})
    app = typer.Typer(name=name, cls=group_class, help=summary, **APP_SETTINGS)
    app.callback()(callback or (lambda: None))
    return typer.main.get_command(app)


def load_command(row: Command) -> Any:
    """Import a row's module and return its click command."""
    target = load_target(row)
    if isinstance(target, tuple):
        return command_group(row.name, target, row.summary)
    description, examples = split_docstring(target)
    app = typer.Typer(**APP_SETTINGS)
    app.command(row.name, help=description, epilog=_epilog(examples))(target)
    return typer.main.get_command(app)


def usage_problem(error: Any) -> str:
    """What the parser says about wrong arguments, without the full stop."""
    return str(error.format_message()).rstrip(".")


def load_target(row: Command) -> Any:
    """Import a row's module, and return its function or its table of sub-commands."""
    module, _, name = row.target.partition(":")
    return getattr(importlib.import_module(module), name)


def split_docstring(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """(description, example command lines) of a command function. The examples are in the last section of its docstring."""
    description, _, section = (inspect.getdoc(function) or "").partition(EXAMPLES_HEADING)
    return description.strip(), [line.strip() for line in section.splitlines() if line.strip()]


def _epilog(examples: list[str]) -> str:
    r"""The examples as the last section of the help. click does not wrap a paragraph that begins with a line of \b alone."""
    return "\n".join([EXAMPLES_HEADING, "", "\b", *(f"  {line}" for line in examples)])
