"""Derives the name of a model, which clients use, from the path or address on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stoker.deploy.deployment import configuration_files

_SUFFIXES = re.compile(r"\.(gguf|tar|tar\.gz|tgz|tar\.bz2|tar\.xz)$", re.IGNORECASE)


def model_name_of(location: str | Path) -> str:
    """The last part of a path or address without the suffix of an archive: Llama-3-8B for s3://bucket/models/Llama-3-8B.tar.gz.

    For a configuration file (serving.properties, config.yaml) it is the name of its folder.
    """
    path = Path(location).expanduser()
    if path.is_file() and path.name in configuration_files():
        path = path.parent
    if path.exists():
        return _SUFFIXES.sub(
            "", Path(os.path.abspath(path)).name
        )  # the name of a link, not of its target: the cache of the hub links to digests
    bare = re.split(r"[?#]", str(location), maxsplit=1)[0].rstrip("/")
    name = bare.rpartition("/")[2]
    return _SUFFIXES.sub("", name.partition("@")[0] if bare.startswith("hf://") else name)
