"""The deployment format of a Hugging Face checkpoint or a GGUF file: all settings have their defaults."""

from __future__ import annotations

from collections.abc import Mapping as Environment
from pathlib import Path

from stoker.deploy.deployment import FORMATS, BuildOptions, Deployment, Format, has_configuration_file
from stoker.deploy.engine import read_config


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder with a config.json that names a model, or a GGUF file.

    A folder with the configuration file of another format has that format.
    """
    if path.suffix == ".gguf" and path.is_file():
        return True
    if not path.is_dir() or has_configuration_file(path):
        return False
    config = read_config(path)
    if "format_version" in config:
        return False
    return bool("model_type" in config or "architectures" in config or (not config and any(path.glob("*.gguf"))))


def load_checkpoint(path: Path, environment: Environment[str, str]) -> Deployment:
    """A deployment that builds an engine from the checkpoint with default settings."""
    return Deployment(format="checkpoint", path=str(path), source=BuildOptions(checkpoint=str(path)))


FORMATS.add("checkpoint", Format(name="checkpoint", recognise=is_checkpoint, load=load_checkpoint))
