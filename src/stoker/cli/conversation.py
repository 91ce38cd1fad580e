"""A conversation of `stoker chat`: its messages and sampling parameters, and the commands that change, show and save them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from stoker.base.errors import ConfigError, RequestError
from stoker.base.registry import nearest
from stoker.base.types import SamplingParams
from stoker.cli.options import SAMPLING_HELP

Messages = list[dict[str, Any]]
# Sampling parameters that /set changes; a conversation has one answer.
SETTABLE = tuple(name for name in SAMPLING_HELP if name != "n")


class Conversation:
    """The messages of a chat so far, and its sampling parameters. `is_ended` is set by /exit."""

    def __init__(self, model: str, system: str | None, params: SamplingParams) -> None:
        self.model = model
        self.params = params
        self.is_ended = False
        self._initial: Messages = [] if system is None else [{"role": "system", "content": system}]
        self._saved_to: set[Path] = set()
        self.messages = list(self._initial)

    def run_command(self, line: str) -> str:
        """Run a line that begins with a slash, and return the text to print. Raises ConfigError or RequestError for a wrong command."""
        name, _, argument = line.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            known = ", ".join(nearest(name, list(COMMANDS)) or COMMANDS)
            raise ConfigError(f"unknown command {name}.", cure=f"Use one of: {known}. Begin a message with // to send a slash.")
        return command.run(self, argument.strip())

    def end(self, argument: str) -> str:
        """The command /exit: end the conversation."""
        self.is_ended = True
        return ""

    def reset(self, argument: str) -> str:
        """The command /reset: drop all messages except the system message."""
        self.messages = list(self._initial)
        return ""

    def set(self, argument: str) -> str:
        """The command /set: change a sampling parameter, or without a name return all parameters as text."""
        name, _, text = argument.replace("=", " ", 1).partition(" ")
        name = name.replace("-", "_")
        if not name:
            return "\n".join(f"{name} {_text(getattr(self.params, name))}" for name in SETTABLE)
        if name not in SETTABLE:
            near = ", ".join(nearest(name, list(SETTABLE)) or SETTABLE)
            raise ConfigError(f"there is no sampling parameter {name}.", cure=f"Use one of: {near}.")
        self.params = msgspec.structs.replace(self.params, **{name: _parse(name, text.strip())})
        return f"{name} {_text(getattr(self.params, name))}"

    def save(self, argument: str) -> str:
        """The command /save: write the messages in OpenAI's form. Existing files of others are not replaced."""
        if not argument:
            raise ConfigError("/save needs a file.", cure="Write /save FILE.")
        file = Path(argument).expanduser()
        if file.exists() and file.absolute() not in self._saved_to:
            raise ConfigError(f"{file} exists.", cure="Name another file.")
        try:
            file.write_text(json.dumps({"model": self.model, "messages": self.messages}, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.", cure="Name another file.") from None
        self._saved_to.add(file.absolute())
        return f"{len(self.messages)} messages are saved to {file}."

    def help(self, argument: str) -> str:
        """The command /help: a description of all commands."""
        rows = [(f"{name} {command.usage}".rstrip(), command.summary) for name, command in COMMANDS.items()]
        rows += [
            ('"""', "A message of several lines begins and ends with three quotes."),
            ("//TEXT", "Sends a message that begins with a slash."),
            ("Ctrl-C", "Stops an answer."),
            ("Ctrl-D", "Ends the conversation, as an empty line does."),
        ]
        return "\n".join(f"{name:<18} {summary}" for name, summary in rows)


class ChatCommand(NamedTuple):
    """One command of `stoker chat`."""

    usage: str
    summary: str
    run: Callable[[Conversation, str], str]


COMMANDS = {
    "/help": ChatCommand("", "Shows this list.", Conversation.help),
    "/exit": ChatCommand("", "Ends the conversation.", Conversation.end),
    "/reset": ChatCommand("", "Starts the conversation anew.", Conversation.reset),
    "/set": ChatCommand("[NAME VALUE]", "Sets a sampling parameter (none: its default), or shows all.", Conversation.set),
    "/save": ChatCommand("FILE", "Writes the conversation to a JSON file.", Conversation.save),
}


def _parse(name: str, text: str) -> Any:
    """The value of the sampling parameter `name`, from text. Raises RequestError when it has another type."""
    default = next(field.default for field in msgspec.structs.fields(SamplingParams) if field.name == name)
    if text.lower() == "none":
        return default
    if name == "stop":
        return (text,) if text else ()
    kind = get_type_hints(SamplingParams)[name]
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        expected = "true or false" if kind is bool else "a number" if kind is float else "a whole number"
        raise RequestError(name, text, f"it is not {expected}") from None


def _text(value: Any) -> str:
    """A value in the form that /set accepts."""
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
