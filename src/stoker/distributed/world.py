"""The world: all ranks of one engine, their hosts, and the groups among them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.base.nodes import leader
from stoker.base.private_api import check_private_api
from stoker.base.start_times import StartTimes
from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.group import SINGLE, Group
from stoker.distributed.pipeline import ALONE, LinkedStage, Stage
from stoker.distributed.token_dispatch import TokenDispatch

log = get_logger(__name__)

# Timeout of a collective. Ranks that end or hang are detected within seconds by the leader's watch thread.
TIMEOUT = timedelta(minutes=30)
CONNECT_CHECK_S = 0.1  # interval at which a rank that connects to others checks whether one has failed
LOCAL_HOST = "localhost"


@dataclass(slots=True)
class World:
    """The position of a rank among all ranks of an engine: rank = stage × ranks per stage + its rank within the stage."""

    rank: int = 0
    size: int = 1
    tensor: Group = SINGLE  # the ranks that hold shards of the layers of this stage
    stage: Stage = ALONE
    everyone: Group = SINGLE
    leader: int = 0  # the rank that plans and samples
    hosts: tuple[str, ...] = (LOCAL_HOST,)  # of each rank; equal names or addresses are the same host
    dispatch: TokenDispatch | None = None  # among the data-parallel ranks, which are then all ranks
    _inner: list[dist.ProcessGroup] = field(default_factory=list)
    _is_global: bool = False

    @property
    def data_parallel(self) -> int:
        """The number of ranks that have sequences of their own."""
        return 1 if self.dispatch is None else self.size

    @property
    def is_leader(self) -> bool:
        """Whether this rank plans steps and samples."""
        return self.rank == self.leader

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are on several hosts."""
        return spans_hosts(self.hosts)

    @property
    def ranks_on_host(self) -> int:
        """The number of ranks on the host of this rank."""
        return self.hosts.count(self.hosts[self.rank]) if self.spans_hosts else self.size

    def close(self) -> None:
        """Leave the groups. Collectives that still wait for other ranks end with an error."""
        for group in self._inner:
            with contextlib.suppress(RuntimeError):
                group.abort()
        if self._is_global and dist.is_initialized():
            dist.destroy_process_group()


ALONE_WORLD = World()


def spans_hosts(hosts: Iterable[str]) -> bool:
    """Whether the ranks are on several hosts."""
    return len(set(hosts)) > 1


def address_of(rank: int, hosts: tuple[str, ...]) -> str:
    """The network address at which other ranks reach `rank`: the loopback address if all are on one host."""
    return hosts[rank] if spans_hosts(hosts) else "127.0.0.1"


def join(
    store: dist.Store,
    rank: int,
    mapping: Mapping,
    device: torch.device,
    *,
    hosts: tuple[str, ...] = (),
    custom_all_reduce: bool = True,
    check: Callable[[], None] = lambda: None,
    times: StartTimes | None = None,
) -> World:
    """Rendezvous with the other ranks through `store`, and create the groups. Every rank of `mapping` must call it.

    `hosts`: the host of each rank, by default one host for all. Without `custom_all_reduce`, all-reduces between GPUs use only NCCL.
    `check` is called while a CPU waits for other ranks, and raises if a rank has failed. `times` records the stages.
    """
    times = times or StartTimes()
    if mapping.world_size == 1:
        return ALONE_WORLD
    tp, size = mapping.tensor_parallel, mapping.world_size
    hosts = hosts or (LOCAL_HOST,) * size
    create = _Gloo(store, rank, address_of(rank, hosts), check) if device.type == "cpu" else _Nccl(store, rank, size, device)
    everyone = create("everyone", range(size))
    times.reached("communicator")
    index = rank // mapping.stage_size
    tensor: Group = SINGLE
    inner = [everyone]
    for stage in range(mapping.pipeline_parallel):
        ranks = range(stage * tp, (stage + 1) * tp)
        members = create(f"stage{stage}", ranks) if tp > 1 else None
        if members is not None and rank in ranks:
            inner.append(members)
            has_peer_memory = custom_all_reduce and not spans_hosts(hosts[member] for member in ranks)
            tensor = _group(members, device, has_peer_memory, check)
    linked: Stage = ALONE
    if mapping.pipeline_parallel > 1:
        checks = spans_hosts(hosts) and device.type == "cpu"
        linked = LinkedStage(everyone, index, mapping.pipeline_parallel, tp, check if checks else None)
    times.reached("groups")
    group = ProcessGroup(everyone, device, check)
    dispatch = TokenDispatch(group) if mapping.data_parallel > 1 else None
    return World(rank, size, tensor, linked, group, leader(mapping), hosts, dispatch, inner, device.type != "cpu")


def _group(inner: dist.ProcessGroup, device: torch.device, has_peer_memory: bool, check: Callable[[], None]) -> Group:
    """The tensor-parallel group, with peer memory if it is available."""
    if device.type == "cpu" or not has_peer_memory:
        return ProcessGroup(inner, device, check)
    check_private_api("stoker.distributed.symmetric")
    from stoker.distributed.symmetric import SymmetricGroup

    try:
        return SymmetricGroup(inner, device)
    except RuntimeError as error:
        log.warning("all-reduces use NCCL, which is slower, instead of the memory of peers: %s", error)
        return ProcessGroup(inner, device, check)


class _Gloo:
    """Creates groups of CPU processes without torch's global state, so that a process may be in several worlds.

    `address`: of the network interface to use, which is the loopback if all ranks are on one host. `check` is called while ranks connect.
    """

    def __init__(self, store: dist.Store, rank: int, address: str, check: Callable[[], None]) -> None:
        self._store, self._rank, self._address, self._check = store, rank, address, check

    def __call__(self, name: str, ranks: range) -> Any:
        """The group of the given ranks called `name`; None if this rank is not among them."""
        if self._rank not in ranks:
            return None
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = TIMEOUT
        store, index = dist.PrefixStore(name, self._store), self._rank - ranks.start
        return _call_checked(lambda: dist.ProcessGroupGloo(store, index, len(ranks), options), self._check)


def _call_checked(create: Callable[[], Any], check: Callable[[], None]) -> Any:
    """The result of `create`, which runs in a thread. Meanwhile `check` is called, and its error is raised.

    gloo connects to the address that a rank has published until TIMEOUT, also if that rank has ended since, and cannot be interrupted.
    """
    future: Future[Any] = Future()

    def run() -> None:
        """The thread: set the result or the error of `create`."""
        try:
            future.set_result(create())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gloo-connect", daemon=True).start()
    while not wait([future], CONNECT_CHECK_S).done:
        check()
    return future.result()


class _Nccl:
    """Creates groups of GPUs through torch's global state, which symmetric memory requires: a process is in one world at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "this process is a rank of another engine on several GPUs, or uses torch.distributed itself.",
                cure="Close that engine first, or load this one in a process of its own, for example with stoker serve.",
            )
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device)

    def __call__(self, name: str, ranks: range) -> Any:
        """The group of the given ranks called `name`. All ranks must call it in the same order."""
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        return dist.new_group(list(ranks), timeout=TIMEOUT, group_desc=name)
