"""Settings of the oldest Truss generation in packages/*/MODEL/config.pbtxt: those of the runtime, and the number of frontends."""

from __future__ import annotations

from pathlib import Path

from stoker.base.fields.errors import InvalidValueError
from stoker.deploy.collected_settings import CollectedSettings
from stoker.deploy.deployment import Origin
from stoker.deploy.triton.keys import KEYS, LLM
from stoker.deploy.triton.model_config import frontends
from stoker.deploy.triton.repository import read_model

_TOKENIZING = ("preprocessing", "postprocessing")
_OTHER = "Stoker reads this when the repository itself is served"


def add_runtime_packages(folder: Path, settings: CollectedSettings) -> None:
    """Add the settings of packages/*/MODEL/config.pbtxt that exist. Unfilled and empty values count as unset.

    Raises ConfigError for a file that cannot be parsed and for a wrong value.
    """
    for file in sorted(folder.glob("packages/*/tensorrt_llm/config.pbtxt"))[:1]:
        for name, scalar in read_model(file).parameters:
            origin, key = Origin(str(file), scalar.line), KEYS[LLM].get(name)
            if key is None or not key.target.startswith("runtime."):
                settings.note(name, _OTHER, origin)
            elif scalar.text and not scalar.unfilled:
                try:
                    settings.set(key.target, key.parse(scalar.text), origin, name)
                except InvalidValueError as error:
                    raise error.config_error(name, origin=origin) from None
    _add_frontends(folder, settings)


def _add_frontends(folder: Path, settings: CollectedSettings) -> None:
    """Set the number of frontend processes: the larger instance count of preprocessing and postprocessing."""
    files = [file for name in _TOKENIZING for file in sorted(folder.glob(f"packages/*/{name}/config.pbtxt"))[:1]]
    found = [setting for file in files if (setting := frontends(read_model(file), settings.notes)) is not None]
    if found:
        largest = max(found, key=lambda setting: setting.value)
        settings.set("server.num_frontends", largest.value, largest.origin, largest.key)
