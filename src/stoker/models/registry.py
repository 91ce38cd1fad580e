"""The registry of architectures: collects the rows of `architectures/` and finds the one that a config.json names."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from typing import Any

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.registry import Registry
from stoker.models import architectures
from stoker.models.architecture import Architecture


def _collect() -> Registry[Architecture]:
    """Import every module of `architectures/` and register its rows under their names and aliases."""
    registry: Registry[Architecture] = Registry("architecture")
    for module in pkgutil.iter_modules(architectures.__path__, f"{architectures.__name__}."):
        for row in importlib.import_module(module.name).ARCHITECTURES:
            for name in (row.name, *row.aliases):
                registry.add(name, row)
    return registry


_REGISTRY = _collect()


def all_architectures() -> list[Architecture]:
    """All rows, each once, in the alphabetical order of their files."""
    return list(dict.fromkeys(_REGISTRY.get(name) for name in _REGISTRY))


def get_architecture(name: str) -> Architecture:
    """The row with this name or alias. Raises ConfigError, which suggests the nearest names."""
    return _REGISTRY.get(name)


def resolve_architecture(hf: dict[str, Any]) -> Architecture:
    """The row for the data of a config.json: the first supported name in `architectures`, or else the row of its `model_type`.

    Raises CheckpointError, which suggests similar names for a misspelled one.
    """
    row = _by_name(hf) or _by_model_type(hf)
    if row is None:
        raise _unknown_architecture(hf)
    variant = row.variant(hf) if row.variant else None
    return get_architecture(variant) if variant else row


def _by_name(hf: dict[str, Any]) -> Architecture | None:
    """The row of the first supported name in `architectures`, or None."""
    names = hf.get("architectures")
    if not isinstance(names, list):
        return None
    return next((get_architecture(name) for name in names if isinstance(name, str) and name in _REGISTRY), None)


def _by_model_type(hf: dict[str, Any]) -> Architecture | None:
    """The row of `model_type`, or None. Only for a config.json without `architectures`."""
    if hf.get("architectures"):
        return None
    return next((row for row in all_architectures() if hf.get("model_type") in row.model_types), None)


def _unknown_architecture(hf: dict[str, Any]) -> CheckpointError:
    """The error for a config.json whose architecture is not in the table, or which names none."""
    names = hf.get("architectures") or [hf.get("model_type")]
    wanted = str(names[0]) if isinstance(names, list) else str(names)
    if wanted == "None":
        return CheckpointError("config.json has neither architectures nor model_type.", cure="Add one of them.")
    known = {_stem(name): name for name in reversed([*_REGISTRY])}  # an alias does not replace its row
    close = difflib.get_close_matches(_stem(wanted), known, n=2, cutoff=0.8)
    similar = [known[stem] for stem in close if stem == _stem(wanted) or stem.rstrip("0123456789") != _stem(wanted)]  # other versions
    if hf.get("architectures") and (kind := hf.get("model_type")) is not None:  # Zamba2 of model_type zamba2 is no misspelled Mamba2
        similar = [name for name in similar if kind in (get_architecture(name).model_types or (kind,))]
    meant = f"If it is misspelled, write {' or '.join(similar)}. " if similar else ""
    listed = f"The {len(all_architectures())} supported architectures are listed in docs/architectures.md."
    return CheckpointError(f"the architecture {wanted!r} is not supported.", cure=meant + listed)


def _stem(name: str) -> str:
    """The distinctive part of an architecture's name: two names that only share ForCausalLM are not similar."""
    return re.split(r"For[A-Z]|Model$|LMHead", name)[0].lower()


def check_version(row: Architecture, hf: dict[str, Any], option: str, value: str) -> None:
    """Check an option of another system that names a model version, such as `baichuan_model_version` or `gpt_model_version`.

    Raises ConfigError when the architecture has no such option, and when `value` contradicts config.json.
    """
    if option not in row.version_options:
        families = [r.name for r in all_architectures() if option in r.version_options]
        raise ConfigError(
            f"{option}={value!r}: {row.name} does not have this option.",
            cure=f"Leave it out; it applies to {', '.join(families) or 'no architecture'}.",
        )
    accepted = row.version_options[option](hf)
    if value not in accepted:
        raise ConfigError(f"{option}={value!r}, but config.json describes {' or '.join(accepted)}.", cure=f"Use {option}={accepted[0]}.")
