"""The path and the name of a checkpoint on the local disk."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.base.errors import CheckpointError
from stoker.base.hub_id import hub_id_of_snapshot


def locate_checkpoint(source: str | Path, name: str | None = None) -> tuple[Path, str]:
    """(path, name) of a checkpoint directory or GGUF file. Without `name`: the hub id of a snapshot in the hub's cache, or the file name.

    Raises CheckpointError when the path does not exist.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise CheckpointError(f"{source} does not exist.", cure="Name a checkpoint directory or a .gguf file.")
    # The name of a link, not of its target: files in the cache of the hub are links to files that are named after digests.
    return path, name or hub_id_of_snapshot(path) or Path(os.path.abspath(path)).name
