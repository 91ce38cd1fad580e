"""Counts the GPUs that a deployment can use, without loading a GPU library."""

from __future__ import annotations

import re
from collections.abc import Mapping as Environment
from pathlib import Path

from stoker.base.errors import ConfigError


def visible_gpus(environment: Environment[str, str], dev: Path = Path("/dev")) -> int:
    """The number of GPUs that are visible: of NVIDIA device files in `dev`, limited by CUDA_VISIBLE_DEVICES in `environment`."""
    present = sum(1 for node in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    selected = environment.get("CUDA_VISIBLE_DEVICES")
    if selected is None:
        return present
    ids = [part.strip() for part in selected.split(",")]
    usable = next((i for i, part in enumerate(ids) if part in ("", "-1", "none", "void", "NoDevFiles")), len(ids))
    return min(present, usable)


def check_world(world_size: int, gpus: int, origin: str, key: str) -> None:
    """Raise ConfigError when there are GPUs, but fewer than ranks. Without a GPU, all ranks run on the CPU.

    `origin` and `key` are the place of the setting in the message.
    """
    if 0 < gpus < world_size:
        raise ConfigError(
            f"{origin}: {key} makes {world_size} ranks in total, and {gpus} GPU{'s are' if gpus > 1 else ' is'} visible.",
            cure="Lower the count, or make more GPUs visible (CUDA_VISIBLE_DEVICES).",
        )
