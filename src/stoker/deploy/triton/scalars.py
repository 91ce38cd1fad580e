"""Numbers and booleans in the fields of a config.pbtxt. An unfilled template variable counts as unset, with a warning."""

from __future__ import annotations

from typing import Any

from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import ValueType, Whole
from stoker.base.registry import nearest
from stoker.deploy.deployment import Note
from stoker.deploy.syntax.pbtxt import Message, Scalar
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.values import BOOLEAN


def text_field(message: Message, name: str) -> str:
    """The text of a field; empty if it is absent or unfilled."""
    scalar = message.scalar(name)
    return "" if scalar is None or scalar.unfilled else scalar.text


def whole_field(file: ModelFile, message: Message, name: str, notes: list[Note], default: int = 0, high: int = 1 << 31) -> int:
    """The whole number (at most `high`) in a field; `default` if it is unfilled, 0 if it is absent. Raises PlacedError."""
    scalar = message.scalar(name)
    return 0 if scalar is None else whole_scalar(file, scalar, name, notes, default, high)


def whole_scalar(file: ModelFile, scalar: Scalar, name: str, notes: list[Note], default: int = 0, high: int = 1 << 31) -> int:
    """The whole number (at most `high`) in a value; `default` if it is unfilled. Raises PlacedError."""
    if scalar.unfilled:
        warn_unfilled(notes, file, scalar, name, default)
        return default
    return int(_parse(file, scalar, Whole(0, high), name))


def flag_field(file: ModelFile, message: Any, name: str, notes: list[Note]) -> bool:
    """The boolean in a field; False if it is absent or unfilled. Raises PlacedError."""
    scalar = message.scalar(name) if isinstance(message, Message) else None
    if scalar is None:
        return False
    if scalar.unfilled:
        warn_unfilled(notes, file, scalar, name, "false")
        return False
    return bool(_parse(file, scalar, BOOLEAN, name))


def _parse(file: ModelFile, scalar: Scalar, type: ValueType, name: str) -> Any:
    """The value of a scalar. Raises PlacedError."""
    try:
        return type.parse(scalar.text)
    except InvalidValueError as error:
        raise file.value_error(scalar.line, name, error) from None


def warn_unfilled(notes: list[Note], file: ModelFile, scalar: Scalar, key: str, default: Any) -> None:
    """Add a warning about a template variable that is not filled."""
    warn(notes, file, scalar.line, key, f"{scalar.text} is not filled; the value is {default}")


def warn(notes: list[Note], file: ModelFile, line: int, key: str, text: str) -> None:
    """Add a warning about a key."""
    notes.append(Note(severity="warning", key=key, text=text, origin=file.origin(line)))


def did_you_mean(name: str, known: list[str]) -> str:
    """A hint for an unknown name, with similar known names."""
    near = nearest(name, known)
    return f"Did you mean {' or '.join(near)}?" if near else "Remove it."
