"""Secrets by name. Configurations contain only names; a value is read for the download that needs it."""

from __future__ import annotations

import re
from collections.abc import Mapping as Environment
from pathlib import Path

from stoker.base.errors import ConfigError

MOUNT = Path("/secrets")
MAX_BYTES = 64 << 10
_PREFIX = "TRUSS_SECRET_"
_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "hf_access_token", "hf_token")


class Secret:
    """A value that does not appear in repr, logs or errors. Call `reveal` only where the value is used."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def reveal(self) -> str:
        """The secret value."""
        return self._value


def find_secret(name: str, environment: Environment[str, str], mount: Path = MOUNT) -> Secret | None:
    """The secret called `name`, from the file /secrets/NAME, the variable TRUSS_SECRET_NAME or the variable NAME; None if there is none.

    A hub token is also read from HF_TOKEN and HUGGING_FACE_HUB_TOKEN. Raises ConfigError for a name with other characters than those of
    `check_secret_name`, and for a file that is too large.
    """
    check_secret_name(name)
    if (mount / name).is_file():
        return _read(mount / name)
    names = [_PREFIX + name, _PREFIX + name.upper(), name, name.upper(), *(_HUB[:2] if name in _HUB else ())]
    value = next((environment[n].strip() for n in names if environment.get(n, "").strip()), None)
    return Secret(value) if value else None


def secret_places(name: str) -> str:
    """A list of the places where the secret can be stored, for messages."""
    return f"/secrets/{name}, {_PREFIX}{name}" + (" or HF_TOKEN" if name in _HUB else "")


def check_secret_name(name: str) -> None:
    """Raise ConfigError unless `name` is a plain name. The message does not contain it, because it may be the secret itself."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(
            "the name of a secret is refused.", cure="Use at most 64 letters, digits, _, - and . (and write the name, not the value)."
        )


def _read(path: Path) -> Secret | None:
    """The secret in a file. Raises ConfigError if it is too large."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes.", cure="Check that the file contains only the secret.")
    text = data.decode("utf-8", "replace").strip()
    return Secret(text) if text else None
