"""Secrets by name: configurations name them, and only the download that needs one reads its value."""

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
    """A value that no repr, log line or error shows; `reveal` gives it to the one call that needs it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def reveal(self) -> str:
        return self._value


def find(name: str, environment: Environment[str, str], mount: Path = MOUNT) -> Secret | None:
    """The secret called `name`: the file /secrets/NAME, else TRUSS_SECRET_NAME, else the variable NAME itself.

    A hub token is also found under the hub's own variables HF_TOKEN and HUGGING_FACE_HUB_TOKEN. Raises ConfigError for a
    name that could leave the folder, and for a file that is too large.
    """
    check_name(name)
    if (mount / name).is_file():
        return _read(mount / name)
    names = [_PREFIX + name, _PREFIX + name.upper(), name, name.upper(), *(_HUB[:2] if name in _HUB else ())]
    value = next((environment[n].strip() for n in names if environment.get(n, "").strip()), None)
    return Secret(value) if value else None


def places(name: str) -> str:
    """Where a person may put the secret, for messages."""
    return f"/secrets/{name}, {_PREFIX}{name}" + (" or HF_TOKEN" if name in _HUB else "")


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is a plain name; a longer text may be the secret itself and is not printed."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(
            "a secret's name is refused.", cure="Use at most 64 letters, digits, _, - and . (and name the secret, not its value)."
        )


def _read(path: Path) -> Secret | None:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes.", cure="Is it the secret?")
    text = data.decode("utf-8", "replace").strip()
    return Secret(text) if text else None
