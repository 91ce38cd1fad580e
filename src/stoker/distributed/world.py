"""All ranks of one engine, and the groups among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.base.config import Mapping
from stoker.base.logging import get_logger
from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.group import SINGLE, Group
from stoker.distributed.pipeline import ALONE, LinkedStage, Stage

log = get_logger(__name__)

# A collective waits so long for a rank. Ranks that die or hang are noticed in seconds, by those who watch them.
TIMEOUT = timedelta(minutes=30)


@dataclass(slots=True)
class World:
    """A rank's place: rank = stage × tensor_parallel + its rank within the stage."""

    rank: int = 0
    size: int = 1
    tensor: Group = SINGLE  # the ranks that share this stage's layers
    stage: Stage = ALONE
    everyone: Group = SINGLE
    leader: int = 0  # the rank that plans and samples
    _inner: list[dist.ProcessGroup] = field(default_factory=list)
    _is_global: bool = False

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    def close(self) -> None:
        """Leave. Collectives that still wait for others end with an error."""
        for group in self._inner:
            with contextlib.suppress(RuntimeError):
                group.abort()
        if self._is_global and dist.is_initialized():
            dist.destroy_process_group()


ALONE_WORLD = World()


def leader(mapping: Mapping) -> int:
    """The rank that plans and samples: the first of the last stage, where the logits are."""
    return (mapping.pipeline_parallel - 1) * mapping.tensor_parallel


def join(
    store: dist.Store,
    rank: int,
    mapping: Mapping,
    device: torch.device,
    *,
    custom_all_reduce: bool = True,
    check: Callable[[], None] = lambda: None,
) -> World:
    """Meet the other ranks through `store`, and make the groups. Every rank of `mapping` must call it.

    Without `custom_all_reduce`, GPUs sum through NCCL alone. `check` raises when a rank has failed: asked while a CPU waits for others.
    """
    if mapping.world_size == 1:
        return ALONE_WORLD
    tp, size = mapping.tensor_parallel, mapping.world_size
    make = _Gloo(store, rank) if device.type == "cpu" else _Nccl(store, rank, size, device)
    everyone = make("everyone", range(size))
    index = rank // tp
    tensor: Group = SINGLE
    inner = [everyone]
    for stage in range(mapping.pipeline_parallel):
        ranks = range(stage * tp, (stage + 1) * tp)
        made = make(f"stage{stage}", ranks) if tp > 1 else None
        if made is not None and rank in ranks:
            inner.append(made)
            tensor = _group(made, device, custom_all_reduce, check)
    linked = LinkedStage(everyone, index, mapping.pipeline_parallel, tp) if mapping.pipeline_parallel > 1 else ALONE
    return World(rank, size, tensor, linked, ProcessGroup(everyone, device, check), leader(mapping), inner, device.type != "cpu")


def _group(inner: dist.ProcessGroup, device: torch.device, custom_all_reduce: bool, check: Callable[[], None]) -> Group:
    if device.type == "cpu" or not custom_all_reduce:
        return ProcessGroup(inner, device, check)
    from stoker.distributed.symmetric import SymmetricGroup

    try:
        return SymmetricGroup(inner, device)
    except RuntimeError as error:
        log.warning("peers' memory is not used, and all-reduces go through NCCL: %s", error)
        return ProcessGroup(inner, device, check)


class _Gloo:
    """Makes groups of CPU processes on this host's loopback, without torch's global state: a process may be in several worlds."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def __call__(self, name: str, ranks: range) -> Any:
        if self._rank not in ranks:
            return None
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), self._rank - ranks.start, len(ranks), options)


class _Nccl:
    """Makes groups of GPUs through torch's global state, which symmetric memory needs: one world a process."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device)

    def __call__(self, name: str, ranks: range) -> Any:
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        return dist.new_group(list(ranks), timeout=TIMEOUT, group_desc=name)
