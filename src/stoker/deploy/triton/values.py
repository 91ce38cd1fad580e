"""The spellings of values in `parameters`, where everything is text. A reader raises ConfigError naming key, text and cure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stoker.base.errors import ConfigError

Read = Callable[[str, str], Any]  # (key, text) → value
MAX_DEVICES = 1024


def text(key: str, value: str) -> str:
    return value


def boolean(key: str, value: str) -> bool:
    """True, true, TRUE, 1 and False, false, FALSE, 0."""
    if value in ("True", "true", "TRUE", "1"):
        return True
    if value in ("False", "false", "FALSE", "0"):
        return False
    raise _refusal(key, value, "Use true or false.")


def truthy(key: str, value: str) -> bool:
    """Python's old strtobool, which the BLS model uses."""
    folded = value.lower()
    if folded in ("true", "yes", "1", "t", "y", "on"):
        return True
    if folded in ("false", "no", "0", "f", "n", "off"):
        return False
    raise _refusal(key, value, "Use true or false.")


def whole(key: str, value: str) -> int:
    if not (value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20):
        raise _refusal(key, value, "Use a whole number.")
    if int(value) < 0:
        raise _refusal(key, value, "Use a whole number of at least 0.")
    return int(value)


def number(key: str, value: str) -> float:
    try:
        result = float(value)
    except ValueError:
        raise _refusal(key, value, "Use a number such as 0.9.") from None
    if not math.isfinite(result):
        raise _refusal(key, value, "Use a finite number.")
    return result


def choice(*choices: str) -> Read:
    def read(key: str, value: str) -> str:
        if value not in choices:
            raise _refusal(key, value, f"Use one of: {', '.join(choices)}.")
        return value

    return read


def batching(choices: tuple[str, ...]) -> Read:
    """gpt_model_type; tools search for the words of this error."""

    def read(key: str, value: str) -> str:
        if value not in choices:
            raise ConfigError(f"Invalid gpt_model_type {value!r}.", cure=f"Use one of: {', '.join(choices)}.")
        return value

    return read


def decoding(modes: tuple[str, ...]) -> Read:
    def read(key: str, value: str) -> str:
        if value in ("medusa", "redrafter", "lookahead", "eagle"):
            raise _refusal(key, value, f"Stoker decodes without draft tokens; use one of: {', '.join(modes)}.")
        return choice(*modes)(key, value)

    return read


def window(key: str, value: str) -> int:
    """One attention window, or a list with one for each layer when all are equal."""
    sizes = {whole(key, part.strip()) for part in value.split(",")}
    if len(sizes) > 1:
        raise _refusal(key, value, "Windows that differ by layer belong to the model's own config; give one size.")
    return sizes.pop()


def devices(key: str, value: str) -> tuple[int, ...]:
    """Device indices of one instance."""
    if ";" in value:
        raise _refusal(key, value, "One repository runs one instance; give the devices of one, and start another server for the rest.")
    ids = tuple(whole(key, part.strip()) for part in value.split(","))
    if len(set(ids)) != len(ids) or len(ids) > MAX_DEVICES or max(ids) >= MAX_DEVICES:
        raise _refusal(key, value, f"Name different devices below {MAX_DEVICES}.")
    return ids


def _refusal(key: str, value: str, cure: str) -> ConfigError:
    shown = value if len(value) <= 80 else value[:79] + "…"
    return ConfigError(f"{key}={shown!r} is refused.", cure=cure)
