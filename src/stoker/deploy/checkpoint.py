"""A Hugging Face checkpoint or a GGUF file, deployed with every setting at its default."""

from __future__ import annotations

from collections.abc import Mapping as Environment
from pathlib import Path

from stoker.deploy.deployment import FORMATS, BuildOptions, Deployment, Format
from stoker.deploy.engine import described, read_config


def recognise(path: Path) -> bool:
    """A config.json that names a model, or GGUF. A folder that also says how it is deployed is of that format instead."""
    if path.suffix == ".gguf" and path.is_file():
        return True
    if not path.is_dir() or described(path):
        return False
    config = read_config(path)
    if "format_version" in config:
        return False
    return bool("model_type" in config or "architectures" in config or (not config and any(path.glob("*.gguf"))))


def load(path: Path, environment: Environment[str, str]) -> Deployment:
    return Deployment(format="checkpoint", path=str(path), source=BuildOptions(checkpoint=str(path)))


FORMATS.add("checkpoint", Format(name="checkpoint", recognise=recognise, load=load))
