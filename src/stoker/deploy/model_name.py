"""The name that clients use for what a person named on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SUFFIXES = re.compile(r"\.(gguf|tar|tar\.gz|tgz|tar\.bz2|tar\.xz)$", re.IGNORECASE)


def of(location: str | Path) -> str:
    """The last part of a path or address, without an archive's suffix: Llama-3-8B of s3://bucket/models/Llama-3-8B.tar.gz.

    A file that describes a folder (serving.properties, config.yaml) stands for that folder.
    """
    path = Path(location).expanduser()
    if path.is_file() and path.suffix in (".properties", ".yaml"):
        path = path.parent
    if path.exists():
        return _SUFFIXES.sub("", Path(os.path.abspath(path)).name)  # a link by its own name: a hub's cache links to digests
    bare = re.split(r"[?#]", str(location), maxsplit=1)[0].rstrip("/")
    name = bare.rpartition("/")[2]
    return _SUFFIXES.sub("", name.partition("@")[0] if bare.startswith("hf://") else name)
