"""The devices on which an engine will probably run, read without torch, so that its processes start before the engine is checked."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.base.config import Mapping, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings, leader, place_ranks
from stoker.engine.config_file import CONFIG_FILE, MAX_CONFIG_BYTES, SummarizedTarget

MAX_RANKS = 16  # of a node; processes of a larger one are started after the checks


class _Engine(msgspec.Struct):
    """The part of an engine's config.json that is read here."""

    mapping: Mapping = Mapping()
    target: SummarizedTarget = SummarizedTarget()


def expected_devices(engine: Path, config: RuntimeConfig, nodes: NodeSettings = NodeSettings()) -> list[str]:
    """The device of each rank of this node, that of the leader first, such as cuda:0.

    Empty if they are unknown: for what is not an engine or does not fit this machine, which the checks of the start report.
    """
    try:
        file = engine / CONFIG_FILE
        if file.stat().st_size > MAX_CONFIG_BYTES:
            return []
        found = msgspec.json.decode(file.read_bytes(), type=_Engine)
        placement = place_ranks(found.mapping, nodes.num_nodes)
    except (OSError, msgspec.MsgspecError, ConfigError, UnicodeDecodeError):
        return []
    ranks = [rank for rank, node in enumerate(placement) if node == nodes.node_rank]
    if len(ranks) > MAX_RANKS:
        return []
    devices = dict.fromkeys(ranks, "cpu")
    if (config.device or found.target.device) == "cuda":
        indices = config.devices or tuple(range(len(ranks)))
        if len(indices) == len(placement):
            indices = tuple(indices[rank] for rank in ranks)
        if len(indices) != len(ranks) or (nodes.local_rank and config.devices is None):
            return []
        devices = {rank: f"cuda:{index}" for rank, index in zip(ranks, indices, strict=True)}
    first = leader(found.mapping)
    return [devices[rank] for rank in sorted(ranks, key=lambda rank: (rank != first, rank))]
