"""The process of a follower rank: loads its shard of the model, then runs each step that the leader publishes."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import StokerError
from stoker.base.logging import configure, get_logger
from stoker.base.process import freeze_objects, importing
from stoker.base.start_times import StartTimes
from stoker.runtime.worker_group.channels.channel import PlanReader
from stoker.runtime.worker_group.channels.shared_memory import ChannelAddress, SharedMemoryReader
from stoker.runtime.worker_group.leader_link import LeaderLink

if TYPE_CHECKING:
    from torch.distributed import Store

    from stoker.engine.config import EngineConfig
    from stoker.runtime.transfer.transfers import RankTransfers
    from stoker.runtime.worker.model_runner import ModelRunner

log = get_logger(__name__)

HEARTBEAT_S = 0.5
# States that are reported to the leader, one byte each.
JOINING, LOADED = b"j", b"l"
# How long a follower spins for the next record before it sleeps. On a GPU the host must be ahead of steps of a few milliseconds.
SPIN_S = {"cuda": 2e-3, "cpu": 0.0}


class FollowTask(msgspec.Struct):
    """The arguments of a follower, which it receives from its leader."""

    engine: str
    rank: int
    reader: int  # index of its end of the plan channel
    device: str
    config: RuntimeConfig
    hosts: tuple[str, ...]  # of all ranks
    address: str  # of the rendezvous store
    port: int
    store_prefix: str  # of the names in the store; unknown to strangers
    channel: ChannelAddress  # its descriptor arrives with the task


def main() -> int:
    """Run the follower process for the device that the command line names. Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to all processes of a job; this one ends with its leader
    configure()
    try:
        follow(LeaderLink(), sys.argv[1], StartTimes())
    except StokerError as error:
        log.error("%s", error)
        return 1
    return 0


def follow(link: LeaderLink, expected_device: str, times: StartTimes) -> None:
    """Receive the task, load this rank, report its progress to the leader, and run the published steps until the leader ends them.

    Imports run, and the context of `expected_device` is created, before there is a task.
    """
    with importing():
        import torch

        from stoker.runtime.worker.device_context import DeviceContext

        context = DeviceContext(expected_device)

        import torch.distributed as dist

        from stoker.distributed.world import join
        from stoker.engine.reader import Engine
        from stoker.runtime.worker.rank import load_rank, use_device

    times.reached("imports")
    context.wait()
    times.reached("device")
    data, fd = link.receive_task()
    task = msgspec.msgpack.decode(data, type=FollowTask)
    times.reached("task")
    channel = SharedMemoryReader(msgspec.structs.replace(task.channel, fd=fd), task.reader)
    threading.Thread(target=_beat, args=(channel,), name="heartbeat", daemon=True).start()
    engine, device = Engine.open(task.engine), torch.device(task.device)
    use_device(device, task.config, task.hosts.count(task.hosts[task.rank]))
    link.report(JOINING)
    store = dist.PrefixStore(task.store_prefix, dist.TCPStore(task.address, task.port, is_master=False))
    world = join(
        store, task.rank, engine.config.mapping, device, hosts=task.hosts, custom_all_reduce=task.config.custom_all_reduce, times=times
    )
    loaded = load_rank(engine, task.config, device, world, times)
    link.report(LOADED)
    loaded.forward_states()
    runner = loaded.runner(world.everyone.smallest(loaded.num_blocks()))
    times.reached("cache")
    runner.warm_up()
    times.reached("warm-up")
    transfers = _serve_transfers(task, engine.config, runner, store) if task.config.transfer is not None else None
    freeze_objects()
    store.set(start_key(task.rank), msgspec.json.encode(times.report(f"rank {task.rank}")).decode())
    world.everyone.smallest(0)
    _run_steps(channel, runner, SPIN_S[device.type], task)
    if transfers is not None:
        transfers.close()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the last step; the leader kills a rank that does not end in time
    runner.close()
    world.close()


def start_key(rank: int) -> str:
    """The name in the store of the report of a rank's start."""
    return f"start{rank}"


def _serve_transfers(task: FollowTask, engine: EngineConfig, runner: ModelRunner, store: Store) -> RankTransfers:
    """Let other engines read this rank's blocks, and report the layout to the leader."""
    from stoker.base.nodes import leader
    from stoker.runtime.transfer.transfers import RankTransfers

    transfers = RankTransfers(task.config, engine, task.rank, leader(engine.mapping))
    transfers.attach(runner)
    transfers.start()
    store.set(f"transfer{task.rank}", msgspec.json.encode(transfers.layout).decode())
    return transfers


def _run_steps(channel: PlanReader, runner: ModelRunner, spin_s: float, task: FollowTask) -> None:
    """Process the leader's records until the END record."""
    from stoker.runtime.step_profiler import RankTrace, trace_folder
    from stoker.runtime.worker_group.records import CAPTURE, END, PROFILE, ZERO_BLOCKS, decode_record

    trace: RankTrace | None = None
    while True:
        record = decode_record(channel.receive(spin_s), runner.inputs.buffer, task.rank)
        if record.kind == END:
            return
        if record.kind == ZERO_BLOCKS:
            runner.zero_blocks(record.blocks)
        elif record.kind == CAPTURE:
            assert record.shape is not None
            runner.capture(record.shape)
        elif record.kind == PROFILE:
            leader_pid, number, starts = record.profile
            if starts:
                trace = RankTrace(trace_folder(leader_pid, number), task.rank, task.device)
            elif trace is not None:
                trace.stop()
                trace = None
        else:
            assert record.packed is not None
            runner.follow(record.packed, record.all_greedy)
        channel.release()


def _beat(channel: PlanReader) -> None:
    """Send heartbeats to the leader for ever, in a thread."""
    while True:
        channel.beat()
        threading.Event().wait(HEARTBEAT_S)


if __name__ == "__main__":
    sys.exit(main())
