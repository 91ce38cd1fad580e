"""The possible completions of a command line: commands, options, values of options, and names of cached engines."""

from __future__ import annotations

from typing import Any

from stoker.base.config import DEVICES, DTYPES, POLICIES
from stoker.cli.command_table import Command, load_command, load_target
from stoker.cli.commands import COMMANDS

# Parameter: its values.
CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "kv_cache_dtype": ("auto", "int8", "float8_e4m3fn"),
    "policy": POLICIES,
    "protocols": ("openai", "kserve", "sagemaker", "truss"),
    "shell": ("bash", "zsh", "fish"),
    "verify": ("auto", "full", "files", "none"),
}
MODELS = ("model", "engines")  # arguments that accept a name of `stoker list`


def complete_words(words: list[str]) -> list[str]:
    """The possible completions of the last of `words`, which follow `stoker`. Empty where the shell should complete file names."""
    *before, last = words
    rows: tuple[Command, ...] = COMMANDS
    while before:
        row = next((row for row in rows if row.name == before[0]), None)
        if row is None:
            return []
        before = before[1:]
        target = load_target(row)
        if not isinstance(target, tuple):
            return [word for word in _words_of_command(load_command(row), before, last) if word.startswith(last)]
        rows = target
    names = [row.name for row in rows] + (["--version", "--help"] if rows is COMMANDS else ["--help"])
    return [name for name in names if name.startswith(last) and (last.startswith("-") or not name.startswith("-"))]


def _words_of_command(command: Any, before: list[str], last: str) -> list[str]:
    """The words that may follow the words `before` of a command: values of the last option, options, or values of arguments."""
    options = {name: parameter for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts) if name[0] == "-"}
    option = options.get(before[-1]) if before else None
    if option is not None and not getattr(option, "is_flag", False):
        return list(CHOICES.get(option.name, ()))
    if last.startswith("-"):
        return [name for name in (*options, "--help") if name.startswith("--") or last == name]
    arguments = [parameter.name for parameter in command.params if not any(name.startswith("-") for name in parameter.opts)]
    values = [value for name in arguments for value in CHOICES.get(name, ())]
    return values + (_cached_names() if any(name in MODELS for name in arguments) else [])


def _cached_names() -> list[str]:
    """The names of cached engines."""
    from stoker.deploy.cached_engines import cached_engines

    return sorted({engine.name for engine in cached_engines()})
