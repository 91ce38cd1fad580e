"""Derives the name of a model, which clients use, from the path or address on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stoker.base.hub_id import hub_id_of_snapshot
from stoker.deploy.deployment import configuration_files
from stoker.deploy.engine import read_config

_SUFFIXES = re.compile(r"\.(gguf|tar|tar\.gz|tgz|tar\.bz2|tar\.xz)$", re.IGNORECASE)
_CONTENT_ADDRESS = re.compile(r"[0-9a-f]{40}")  # the folder of an engine in the cache


def model_name_of(location: str | Path) -> str:
    """The name of a model: the last part of its path or address without the suffix of an archive.

    An example is Llama-3-8B for s3://bucket/models/Llama-3-8B.tar.gz. For a configuration file (serving.properties, config.yaml) it is the
    name of its folder; for an engine in the cache, whose folder is named after a digest, that of its checkpoint; for a snapshot in the
    cache of the hub, that of the repository.
    """
    path = Path(location).expanduser()
    if path.is_file() and path.name in configuration_files():
        path = path.parent
    if not path.exists():
        return _without_suffix(checkpoint_name_of(location).rpartition("/")[2])
    if _CONTENT_ADDRESS.fullmatch(path.resolve().name) and (origin := read_config(path).get("checkpoint")):
        return _without_suffix(str(origin.get("name") or path.name).rpartition("/")[2])
    return _without_suffix(checkpoint_name_of(path).rpartition("/")[2])


def checkpoint_name_of(location: str | Path) -> str:
    """The name of the checkpoint in an engine's config: the file name of a path, a hub id, or the last part of an address."""
    path = Path(location).expanduser()
    if path.is_file() or path.is_dir():
        if repository := hub_id_of_snapshot(path):
            return repository if path.is_dir() else path.name
        return Path(os.path.abspath(path)).name  # the name of a link, not of its target
    bare = re.split(r"[?#]", str(location), maxsplit=1)[0].rstrip("/")
    if bare.startswith("hf://") or "://" not in bare:
        return bare.removeprefix("hf://").partition("@")[0]
    return bare.rpartition("/")[2]


def _without_suffix(name: str) -> str:
    """The name without the suffix of an archive."""
    return _SUFFIXES.sub("", name)
