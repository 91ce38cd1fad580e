"""Settings of speculative decoding that have no effect with the draft proposer of a RuntimeConfig."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from stoker.base.config import PROPOSERS, RuntimeConfig
from stoker.base.errors import ConfigError

_DEFAULTS = {"draft_tokens": None, "draft_tree": None, "adaptive_drafts": True}
_DRAFTER = "the directory of a draft engine or of draft heads"


def uses_drafter(runtime: RuntimeConfig) -> bool:
    """Whether `runtime` names a directory that drafts on the device: a draft engine or draft heads."""
    return runtime.speculate not in PROPOSERS


def unused_draft_settings(runtime: RuntimeConfig) -> list[str]:
    """The names of the settings of drafts that are not at their default and have no effect with `speculate`."""
    needed = {name: _needed_by(name, runtime.speculate) for name in _DEFAULTS}
    return [name for name, default in _DEFAULTS.items() if needed[name] is not None and getattr(runtime, name) != default]


def check_draft_settings(runtime: RuntimeConfig, names: Collection[str] = tuple(_DEFAULTS)) -> None:
    """Raise ConfigError for a setting of drafts among `names` that has no effect with `speculate`."""
    for name in unused_draft_settings(runtime):
        if name in names:
            raise ConfigError(
                f"{name}={getattr(runtime, name)} has no effect with speculate={runtime.speculate}.",
                cure=f"Set speculate to {_needed_by(name, runtime.speculate)}, or leave {name} out.",
            )


def without_unused_drafts(runtime: RuntimeConfig) -> RuntimeConfig:
    """A copy in which the settings of drafts that have no effect are at their default."""
    return msgspec.structs.replace(runtime, **{name: _DEFAULTS[name] for name in unused_draft_settings(runtime)})


def _needed_by(name: str, speculate: str) -> str | None:
    """The values of `speculate` that the setting `name` needs, as text. None if `speculate` is one of them."""
    if speculate not in PROPOSERS:
        return None
    if name == "draft_tree":
        return _DRAFTER
    return f"ngram, request, or {_DRAFTER}" if speculate == "none" else None
