"""An engine directory, deployed as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import FORMATS, Deployment, EngineSource, Format

CONFIG = "config.json"
MAX_CONFIG_BYTES = 64 << 20


def recognise(path: Path) -> bool:
    """A config.json that an engine's build wrote. A folder that also says how it is deployed is of that format instead."""
    return "format_version" in read_config(path) and not described(path)


def load(path: Path, environment: Environment[str, str]) -> Deployment:
    return Deployment(format="engine", path=str(path), source=EngineSource(location=str(path)))


def described(path: Path) -> bool:
    """Whether a file of another format says how the folder is deployed."""
    return (path / "serving.properties").is_file() or (path / "config.yaml").is_file()


def read_config(path: Path) -> dict[str, Any]:
    """The folder's config.json; empty when there is none, or it is no object."""
    file = path / CONFIG
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} has more than {MAX_CONFIG_BYTES} bytes.", cure="Is it an engine's, or a checkpoint's?")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


FORMATS.add("engine", Format(name="engine", recognise=recognise, load=load))
