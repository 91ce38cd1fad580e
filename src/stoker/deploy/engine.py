"""The deployment format of an engine directory: all settings have their defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import FORMATS, Deployment, EngineSource, Format, has_configuration_file

CONFIG = "config.json"
MAX_CONFIG_BYTES = 64 << 20


def is_engine(path: Path) -> bool:
    """Whether `path` is a folder with the config.json of an engine.

    A folder with the configuration file of another format has that format.
    """
    return "format_version" in read_config(path) and not has_configuration_file(path)


def load_engine(path: Path, environment: Environment[str, str]) -> Deployment:
    """A deployment of the engine with default settings."""
    return Deployment(format="engine", path=str(path), source=EngineSource(location=str(path)))


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a folder; empty when it does not exist or is not an object."""
    file = path / CONFIG
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{file} has more than {MAX_CONFIG_BYTES} bytes.", cure="Check that the file belongs to an engine or a checkpoint."
        )
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


FORMATS.add("engine", Format(name="engine", recognise=is_engine, load=load_engine))
