"""A YAML file with the options of a command. Options on the command line take precedence over those in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from stoker.base.errors import ConfigError
from stoker.base.registry import nearest


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """The callback of --config: makes the values of the file the defaults of the command's parameters.

    A key is the name of an option, with - or _, or `model`. Raises ConfigError with the line for a key or value that is not accepted.
    """
    if file is None or context.resilient_parsing:
        return file
    from stoker.base import yaml_tree

    try:
        root = yaml_tree.parse(file.read_bytes(), str(file)).value
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", cure="Name a YAML file with options.") from None
    if not isinstance(root, dict):
        raise ConfigError(f"{file} is not a mapping of options to values.", cure="Write lines such as port: 8000.")
    parameters = _parameters_by_key(context)
    defaults: dict[str, Any] = {}
    for key, node in root.items():
        place = f"{file}:{node.line}"
        parameter = parameters.get(key.replace("_", "-"))
        if parameter is None:
            near = nearest(key.replace("_", "-"), list(parameters)) or sorted(parameters)
            raise ConfigError(f"{place}: unknown option {key}.", cure=f"Use one of: {', '.join(near)}.")
        if parameter.name in defaults:
            raise ConfigError(f"{place}: {key} sets an option for the second time.", cure="Keep one of the two.")
        if (value := node.plain()) is not None:
            defaults[parameter.name] = given = _as_given(parameter, value, f"{place}: {key}")
            checked_value(context, parameter, given, f"{place}: {key}")
    context.default_map = defaults
    return file


def _parameters_by_key(context: typer.Context) -> dict[str, Any]:
    """The parameters of the command by their keys in the file. --no-x has no key: x: false is the same."""
    found: dict[str, Any] = {}
    for parameter in context.command.params:
        if parameter.name not in ("config", "help"):
            names = [option for option in parameter.opts if option.startswith("--")] or [parameter.name]
            found |= {name.removeprefix("--").replace("_", "-"): parameter for name in names}
    return found


def _as_given(parameter: Any, value: Any, place: str) -> Any:
    """A value of the file in the form that a command line has: a text, a list of texts for a repeatable option, or a flag."""
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{place}={value!r} is refused.", cure="Use true or false.")
        return value
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list, bool)) or item is None for item in values):
        raise ConfigError(f"{place} is refused.", cure="Use text or a number, or a list of them.")
    texts = [str(item) for item in values]
    return texts if getattr(parameter, "multiple", False) else ",".join(texts)


def checked_value(context: typer.Context, parameter: Any, value: Any, place: str) -> Any:
    """The value for a parameter that is given as `value`. Raises ConfigError, which begins with `place`, if it is not accepted."""
    try:
        return parameter.process_value(context, value)
    except typer.BadParameter as error:
        raise ConfigError(f"{place}: {error.message.rstrip('.')}.", cure="Correct the value.") from None
