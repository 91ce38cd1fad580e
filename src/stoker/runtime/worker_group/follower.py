"""A rank's process that follows the leader: it loads its part, then runs each step that the ring brings."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import StokerError
from stoker.base.logging import configure, get_logger

log = get_logger(__name__)

BEAT_S = 0.5
JOINING, LOADED = b"j", b"l"  # told to the leader, one byte each


class FollowTask(msgspec.Struct):
    """What a follower is told when it starts."""

    engine: str
    rank: int
    reader: int
    device: str
    config: RuntimeConfig
    port: int  # of the store where the ranks meet, on the loopback
    ring_fd: int
    num_readers: int
    slot_size: int
    status_fd: int


def main() -> int:
    configure()
    task = msgspec.msgpack.decode(_read_task(), type=FollowTask)
    _end_with_leader()
    try:
        follow(task)
    except StokerError as error:
        log.error("%s", error)
        return 1
    return 0


def follow(task: FollowTask) -> None:
    """Load, tell, and follow until the end."""
    import torch
    import torch.distributed as dist

    from stoker.distributed.world import join
    from stoker.engine.reader import Engine
    from stoker.runtime.worker.rank import load_rank, use_device
    from stoker.runtime.worker_group.shared_memory import Ring

    ring = Ring(task.ring_fd, task.num_readers, task.slot_size)
    threading.Thread(target=_beat, args=(ring, task.reader), name="beat", daemon=True).start()
    engine, device = Engine.open(task.engine), torch.device(task.device)
    use_device(device, task.config, engine.world_size)
    os.write(task.status_fd, JOINING)
    world = join(dist.TCPStore("127.0.0.1", task.port, is_master=False), task.rank, engine.config.mapping, device,
                 custom_all_reduce=task.config.custom_all_reduce)  # fmt: skip
    loaded = load_rank(engine, task.config, device, world)
    os.write(task.status_fd, LOADED)
    runner = loaded.runner(world.everyone.smallest(loaded.num_blocks()))
    runner.warm_up()
    world.everyone.smallest(0)
    _run(ring, task.reader, runner, device.type)


def _run(ring: Any, reader: int, runner: Any, device: str) -> None:
    from stoker.runtime.worker_group.shared_memory import END, FORGET, SPIN_S, decode

    while True:
        record = decode(ring.take(reader, SPIN_S[device]), runner.inputs.buffer)
        if record.kind == END:
            return
        if record.kind == FORGET:
            runner.zero_blocks(record.blocks)
        else:
            runner.follow(record.packed, record.all_greedy)
        ring.release(reader)


def _beat(ring: Any, reader: int) -> None:
    while True:
        ring.beat(reader)
        threading.Event().wait(BEAT_S)


def _read_task() -> bytes:
    size = int.from_bytes(os.read(0, 8), "little")
    data = b""
    while len(data) < size and (piece := os.read(0, size - len(data))):
        data += piece
    return data


def _end_with_leader() -> None:
    """The leader holds the other end of standard input: when that closes, it is gone, and nothing here is worth finishing."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="leader", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
