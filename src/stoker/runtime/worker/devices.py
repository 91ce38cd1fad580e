"""The devices of the ranks of one node."""

from __future__ import annotations

import torch

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings, place_ranks, ranks_per_node
from stoker.engine.reader import Engine


def rank_devices(engine: Engine, config: RuntimeConfig, nodes: NodeSettings) -> dict[int, torch.device]:
    """The device of each rank of this node, by rank. Raises ConfigError unless there are as many devices as ranks.

    `config.devices` has one device for each rank of the node, or for each rank of the engine. By default these are the first devices, and
    for several processes of a job on the same host the next ones for each.
    """
    mapping = engine.config.mapping
    per_node = ranks_per_node(mapping, nodes.num_nodes)
    ranks = [rank for rank, node in enumerate(place_ranks(mapping, nodes.num_nodes)) if node == nodes.node_rank]
    kind, size = config.device or engine.config.target.device, engine.world_size
    built = f"{engine.path} is built for {mapping.ranks}"
    if nodes.num_nodes > 1:
        built += f", {per_node} on each of {nodes.num_nodes} nodes"
    if kind == "cpu":
        if config.devices is not None:
            raise ConfigError(f"devices={list(config.devices)} name GPUs, and {engine.path} runs on the CPU.", cure="Leave devices out.")
        return dict.fromkeys(ranks, torch.device("cpu"))
    num_devices = torch.cuda.device_count()
    chosen = config.devices or _default_devices(per_node, nodes.local_rank, num_devices)
    if len(chosen) == size:
        chosen = tuple(chosen[rank] for rank in ranks)
    if len(chosen) != per_node:
        cure = "Name one device per rank." if nodes.num_nodes == 1 else "Name one device per rank of this node."
        raise ConfigError(f"{built}, and devices={list(chosen)} names {len(chosen)}.", cure=cure)
    if len(set(chosen)) < per_node or not all(0 <= index < num_devices for index in chosen):
        cure = f"Name {per_node} different devices of this machine, or build the engine for fewer ranks."
        raise ConfigError(f"{built}; devices={list(chosen)}, and this machine has {num_devices}.", cure=cure)
    return {rank: torch.device("cuda", index) for rank, index in zip(ranks, chosen, strict=True)}


def _default_devices(per_node: int, local_rank: int, num_devices: int) -> tuple[int, ...]:
    """The next `per_node` devices after those of the processes with a lower local rank, or the first ones if only those are visible."""
    first = local_rank * per_node
    return tuple(range(first, first + per_node) if first + per_node <= num_devices else range(per_node))
