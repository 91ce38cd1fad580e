"""The table of head kinds. A folder is recognized by the tensors and keys that only one kind has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.base.errors import CheckpointError
from stoker.base.registry import Registry
from stoker.runtime.heads.eagle import is_eagle, load_eagle
from stoker.runtime.heads.eagle3 import is_eagle3, load_eagle3
from stoker.runtime.heads.folder import HeadFolder
from stoker.runtime.heads.head import ParallelHead, RecurrentHead, Target
from stoker.runtime.heads.medusa import is_medusa, load_medusa
from stoker.runtime.heads.mtp import is_mtp, load_mtp


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of heads: whether a folder holds them, and how they are loaded."""

    recognizes: Callable[[HeadFolder], bool]
    load: Callable[[HeadFolder, Target], ParallelHead | RecurrentHead]


HEADS: Registry[HeadKind] = Registry("kind of heads")
HEADS.add("medusa", HeadKind(is_medusa, load_medusa))
HEADS.add("eagle3", HeadKind(is_eagle3, load_eagle3))
HEADS.add("eagle", HeadKind(is_eagle, load_eagle))
HEADS.add("mtp", HeadKind(is_mtp, load_mtp))


def kind_of(folder: HeadFolder) -> str:
    """The name of the kind of heads in a folder. Raises CheckpointError for other folders."""
    for name in HEADS:
        if HEADS.get(name).recognizes(folder):
            return name
    examples = ", ".join(sorted(folder.names)[:3])
    raise CheckpointError(
        f"speculate={str(folder.path)!r} is no engine and holds no draft heads that are supported; it has tensors such as {examples}.",
        cure=f"Supported: {', '.join(HEADS)}. Convert a draft model with `stoker build`.",
    )


def load_heads(path: Path, target: Target) -> ParallelHead | RecurrentHead:
    """Load the heads in a directory. Raises CheckpointError for unsupported or damaged files, ConfigError if they do not fit the model."""
    folder = HeadFolder.open(path)
    return HEADS.get(kind_of(folder)).load(folder, target)
