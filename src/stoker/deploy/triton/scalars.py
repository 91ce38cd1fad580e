"""Leaves of a config.pbtxt as numbers and booleans. A template variable that was never filled counts as unset, with a warning."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.registry import nearest
from stoker.deploy.deployment import Note
from stoker.deploy.pbtxt import Message, Scalar
from stoker.deploy.triton import values
from stoker.deploy.triton.repository import ModelFile


def text(message: Message, name: str) -> str:
    scalar = message.scalar(name)
    return "" if scalar is None or scalar.unfilled else scalar.text


def whole(file: ModelFile, message: Message, name: str, notes: list[Note], default: int = 0, high: int = 1 << 31) -> int:
    """A whole number up to `high`; `default` when its template variable was never filled, and 0 when the field is absent."""
    scalar = message.scalar(name)
    return 0 if scalar is None else whole_of(file, scalar, name, notes, default, high)


def whole_of(file: ModelFile, scalar: Scalar, name: str, notes: list[Note], default: int = 0, high: int = 1 << 31) -> int:
    if scalar.unfilled:
        unfilled(notes, file, scalar, name, default)
        return default
    value = int(_placed(file, scalar, values.whole, name))
    if value > high:
        raise file.error(scalar.line, f"{name}={value} is refused.", f"Use at most {high}.")
    return value


def flag(file: ModelFile, message: Any, name: str, notes: list[Note]) -> bool:
    scalar = message.scalar(name) if isinstance(message, Message) else None
    if scalar is None:
        return False
    if scalar.unfilled:
        unfilled(notes, file, scalar, name, "false")
        return False
    return bool(_placed(file, scalar, values.boolean, name))


def _placed(file: ModelFile, scalar: Scalar, read: values.Read, name: str) -> Any:
    try:
        return read(name, scalar.text)
    except ConfigError as error:
        raise file.error(scalar.line, error.message, error.cure) from None


def unfilled(notes: list[Note], file: ModelFile, scalar: Scalar, key: str, default: Any) -> None:
    warn(notes, file, scalar.line, key, f"{scalar.text} was never filled; {default} counts")


def warn(notes: list[Note], file: ModelFile, line: int, key: str, text: str) -> None:
    notes.append(Note(severity="warning", key=key, text=text, origin=file.origin(line)))


def did_you_mean(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f"Did you mean {' or '.join(near)}?" if near else "Remove it."
