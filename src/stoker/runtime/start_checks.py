"""Checks that an engine can run with its settings on this machine, before anything is loaded.

`stoker serve` runs these checks while its executor still imports what it needs, so that this module imports neither the executor nor
the layers of models.
"""

from __future__ import annotations

import torch

from stoker.base.config import Mapping, RuntimeConfig
from stoker.base.draft_settings import check_draft_settings, uses_drafter
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings, leader
from stoker.engine.reader import Engine
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.devices import rank_devices


def check_start(engine: Engine, config: RuntimeConfig, nodes: NodeSettings = NodeSettings()) -> dict[int, torch.device]:
    """The device of each rank of this node. Loads nothing.

    Raises ConfigError or EngineError if the engine cannot run with `config` on this machine.
    """
    devices = rank_devices(engine, config, nodes)
    for device in devices.values():
        engine.check_device(device)
    _check(engine, config, list(devices), nodes.num_nodes)
    if config.transfer is not None:
        from stoker.runtime.transfer.transfers import check_transfers

        check_transfers(config, engine.config.model.requires_whole_prompt, nodes.num_nodes)
    capacity = Capacity.of(engine.config.limits, engine.config.model.max_positions, config)
    drafting = devices.get(leader(engine.config.mapping))
    if uses_drafter(config) and drafting is not None:  # other nodes do not draft
        from stoker.runtime.worker.draft_sources import check_drafter
        from stoker.runtime.worker.rank import draft_task

        check_drafter(draft_task(engine, config, drafting, capacity))
    return devices


def _check(engine: Engine, config: RuntimeConfig, ranks: list[int], num_nodes: int) -> None:
    """Raise ConfigError or EngineError for settings, or files of `ranks`, that do not match the engine."""
    built = str(engine.kv_dtype).removeprefix("torch.")
    if config.kv_cache_dtype not in (None, "auto", built):
        dtype = config.kv_cache_dtype
        raise ConfigError(f"kv_cache_dtype={dtype} is refused: the engine stores {built}.", cure=f"Build it with --kv-cache-dtype {dtype}.")
    if config.kv_events is not None and engine.config.model.requires_whole_prompt:
        raise ConfigError(
            f"kv_events={config.kv_events!r} is refused: this model reuses no prefixes, so there are no events.", cure="Leave it out."
        )
    for name in ("target_itl_ms", "target_ttft_ms"):
        if getattr(config, name) is not None and engine.config.model.requires_whole_prompt:
            raise ConfigError(f"{name} is refused: this model computes a prompt in one step, whatever its length.", cure="Leave it out.")
    check_draft_settings(config)
    if config.speculate != "none" and engine.config.model.has_state:
        _check_state_drafts(engine.config.mapping, config)
    if config.transfer is not None and engine.config.model.has_state:
        raise ConfigError(
            f"transfer={config.transfer} is refused: the recurrent states of this model are not transferred.", cure="Leave it out."
        )
    if engine.config.mapping.data_parallel > 1:
        _check_data_parallel(engine.config.mapping, config, num_nodes)
    for rank in ranks:
        engine.check_rank(rank)


def _check_state_drafts(mapping: Mapping, config: RuntimeConfig) -> None:
    """Raise ConfigError for speculative decoding that engines with recurrent states do not support."""
    if config.tree is not None:
        raise ConfigError(
            "draft_tree is refused: the recurrent states of this model follow one chain of drafts.",
            cure="Leave it out, and use draft_tokens.",
        )
    if mapping.pipeline_parallel > 1:
        raise ConfigError(
            f"speculate={config.speculate} is refused: with pipeline_parallel={mapping.pipeline_parallel}, recurrent states cannot be "
            "taken back when a draft is rejected.",
            cure="Use speculate=none, or build the engine with tensor parallelism.",
        )


def _check_data_parallel(mapping: Mapping, config: RuntimeConfig, num_nodes: int) -> None:
    """Raise ConfigError for a setting that engines of several data-parallel ranks do not support."""
    refused = {
        "nnodes": (num_nodes, 1),
        "speculate": (config.speculate, "none"),
        "kv_events": (config.kv_events, None),
        "transfer": (config.transfer, None),
        "target_itl_ms": (config.target_itl_ms, None),
        "target_ttft_ms": (config.target_ttft_ms, None),
    }
    for name, (value, required) in refused.items():
        if value != required:
            problem = f"{name}={value} is refused: the engine was built with data_parallel={mapping.data_parallel}."
            raise ConfigError(problem, cure="Leave it out, or build the engine with tensor_parallel instead.")
