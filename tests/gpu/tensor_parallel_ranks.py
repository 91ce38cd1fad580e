"""Tensor-parallel ranks of this host, a process and a GPU for each, for scripts that check what they compute together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from stoker.base.config import Mapping
from stoker.distributed.symmetric import SymmetricGroup
from stoker.distributed.world import join
from stoker.kernels import ops


def run_ranks(check: Callable[[SymmetricGroup], None], num_ranks: int) -> None:
    """Run `check`, a function of a module, in each rank with the group of all, whose inboxes work. A failed rank ends the others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(_run_rank, (num_ranks, store.port, check), num_ranks)


def _run_rank(rank: int, num_ranks: int, port: int, check: Callable[[SymmetricGroup], None]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    world = join(dist.TCPStore("127.0.0.1", port, is_master=False), rank, Mapping(tensor_parallel=num_ranks), device)
    group = world.tensor
    assert isinstance(group, SymmetricGroup)
    ops.check_inboxes(group)
    assert group.inboxes is not None, "the GPUs cannot access each other's memory"
    with torch.inference_mode():
        check(group)
    world.everyone.smallest(0)
    world.close()
