"""How many GPUs a deployment may count on, told without loading a GPU library."""

from __future__ import annotations

import re
from collections.abc import Mapping as Environment
from pathlib import Path

from stoker.base.errors import ConfigError


def visible_gpus(environment: Environment[str, str], dev: Path = Path("/dev")) -> int:
    """NVIDIA device files, at most as many as CUDA_VISIBLE_DEVICES names."""
    present = sum(1 for node in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return present
    ids = [part.strip() for part in named.split(",")]
    usable = next((i for i, part in enumerate(ids) if part in ("", "-1", "none", "void", "NoDevFiles")), len(ids))
    return min(present, usable)


def check_world(world_size: int, gpus: int, origin: str, key: str) -> None:
    """Raise ConfigError when there are GPUs, but fewer than ranks. Without any GPU the ranks run on the CPU."""
    if 0 < gpus < world_size:
        raise ConfigError(
            f"{origin}: {key} asks for {world_size} ranks in all, and {gpus} GPU{'s are' if gpus > 1 else ' is'} visible.",
            cure="Lower the count, or make more GPUs visible (CUDA_VISIBLE_DEVICES).",
        )
