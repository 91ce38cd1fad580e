"""From a config.json to the row of the table that reads it."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.registry import nearest
from stoker.models.architecture import ARCHITECTURES, Architecture


def resolve(hf: dict[str, Any]) -> Architecture:
    """The architecture of config.json's data: the first known name of `architectures`, else the row of its `model_type`.

    Raises CheckpointError with the nearest supported names.
    """
    row = _by_name(hf) or _by_model_type(hf)
    if row is None:
        raise _unknown(hf)
    variant = row.variant(hf) if row.variant else None
    return ARCHITECTURES.get(variant) if variant else row


def _by_name(hf: dict[str, Any]) -> Architecture | None:
    names = hf.get("architectures")
    if not isinstance(names, list):
        return None
    return next((ARCHITECTURES.get(name) for name in names if isinstance(name, str) and name in ARCHITECTURES), None)


def _by_model_type(hf: dict[str, Any]) -> Architecture | None:
    if hf.get("architectures"):
        return None
    return next((row for row in rows() if hf.get("model_type") in row.model_types), None)


def rows() -> list[Architecture]:
    """Each row once, in the order of the table."""
    return list(dict.fromkeys(ARCHITECTURES.get(name) for name in ARCHITECTURES))


def _unknown(hf: dict[str, Any]) -> CheckpointError:
    names = hf.get("architectures") or [hf.get("model_type")]
    wanted = str(names[0]) if isinstance(names, list) else str(names)
    if wanted == "None":
        return CheckpointError("config.json names no architectures and no model_type.", cure="Add one of them.")
    known = [row.name for row in rows()]
    return CheckpointError(f"unknown architecture {wanted!r}.", cure=f"Use one of: {', '.join(nearest(wanted, known) or known)}.")


def check_version(row: Architecture, hf: dict[str, Any], option: str, value: str) -> None:
    """Refuse a foreign option that names a version (`baichuan_model_version`, `chatglm_model_version`, `gpt_model_version`).

    Raises ConfigError when config.json contradicts it, and for an option of another family.
    """
    if option not in row.versions:
        having = [r.name for r in rows() if option in r.versions]
        raise ConfigError(
            f"{option}={value!r}: {row.name} has no versions.", cure=f"Leave it out; it is for {', '.join(having) or 'no model'}."
        )
    found = row.versions[option](hf)
    if value not in found:
        raise ConfigError(f"{option}={value!r}, but config.json is {' or '.join(found)}.", cure=f"Use {option}={found[0]}.")
