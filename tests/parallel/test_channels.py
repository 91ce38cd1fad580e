"""Plan channels: every follower receives all records in order, in shared memory and through TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_links import FACTS, link_pair

from stoker.base.config import Mapping
from stoker.base.errors import RankError
from stoker.distributed.world import World, address_of, join
from stoker.runtime.worker.inputs import PackedStep, Shape
from stoker.runtime.worker_group.channels.channel import PlanReader
from stoker.runtime.worker_group.channels.shared_memory import NUM_SLOTS, SharedMemoryChannel, SharedMemoryReader
from stoker.runtime.worker_group.channels.tcp import TcpChannel, TcpReader
from stoker.runtime.worker_group.hosts.link import Link
from stoker.runtime.worker_group.hosts.messages import JoinRequest, NodeStatus
from stoker.runtime.worker_group.hosts.remote_node import RemoteNode
from stoker.runtime.worker_group.records import END, STEP, ZERO_BLOCKS, decode_record, encode_step, max_step_size

LIMIT = max_step_size(max_num_tokens=6, max_rows=3, max_blocks=4)


@st.composite
def steps(draw: st.DrawFn) -> tuple[PackedStep, bool]:
    tokens, rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    flags = draw(st.tuples(*[st.booleans()] * 5))
    drafts = draw(st.integers(0, 2))
    packed = PackedStep(
        torch.empty(0), Shape(tokens, rows, flags[0], drafts if flags[1] else 0), width, rows, rows, 0, tokens, 40, flags[1], [],
        is_prefix_lm=flags[2], has_adapters=flags[3], max_drafts=drafts, num_sequences=rows,
        num_moves=draw(st.integers(0, 5)),
    )  # fmt: skip
    packed.host = torch.full((packed.buffer_size,), draw(st.integers(0, 1 << 30)), dtype=torch.int32)
    return packed, flags[4]


RECORDS = st.lists(steps() | st.lists(st.integers(0, 1000), min_size=1, max_size=9), max_size=30)


def receive_all(reader: PlanReader, pauses: Iterator[float], received: list[object]) -> None:
    """Decode records until the end. Steps are converted to tuples."""
    while True:
        record = decode_record(reader.receive(0.0), lambda size: torch.empty(size, dtype=torch.int32))
        if record.kind == STEP:
            assert record.packed is not None
            received.append(comparable(record.packed, record.all_greedy))
        elif record.kind == ZERO_BLOCKS:
            received.append(record.blocks)
        time.sleep(next(pauses))
        reader.release()
        reader.beat()
        if record.kind == END:
            return


def comparable(packed: PackedStep, all_greedy: bool) -> tuple[object, ...]:
    return (*encode_step(packed, all_greedy), packed.shape, packed.sizes, packed.host.tolist())


class TcpEnds:
    """The channel of node 0 and the readers of the other nodes, connected over the loopback interface."""

    def __init__(self, num_readers: int, record_size: int) -> None:
        pairs = [link_pair() for _ in range(num_readers)]
        nodes = [RemoteNode(server, JoinRequest(node_rank=index + 1, name="test", facts=FACTS)) for index, (server, _) in enumerate(pairs)]
        self.channel = TcpChannel(nodes, record_size)
        self.released = [0] * num_readers
        self.readers: list[PlanReader] = [self._reader(index, pairs[index][1], record_size) for index in range(num_readers)]

    def _reader(self, index: int, link: Link, record_size: int) -> PlanReader:
        class Counting(TcpReader):
            def release(inner) -> None:
                self.released[index] += 1

        return Counting(link, record_size, 5.0, lambda: NodeStatus(0, self.released[index]))


class SharedMemoryEnds:
    def __init__(self, num_readers: int, record_size: int) -> None:
        self.channel = SharedMemoryChannel(num_readers, record_size)
        self.readers = [SharedMemoryReader(self.channel.address, index) for index in range(num_readers)]


ENDS = {"shared_memory": SharedMemoryEnds, "tcp": TcpEnds}


@pytest.mark.parametrize("kind", list(ENDS))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(records=RECORDS, num_readers=st.integers(1, 3), seed=st.integers(0, 1 << 16))
def test_every_follower_receives_all_records_in_order(kind: str, records: list[object], num_readers: int, seed: int) -> None:
    ends = ENDS[kind](num_readers, LIMIT)
    channel = ends.channel
    received: list[list[object]] = [[] for _ in range(num_readers)]
    threads = []
    for index, reader in enumerate(ends.readers):
        pauses = map(float, np.random.default_rng(seed + index).choice([0.0, 0.0, 2e-4], len(records) + 1))
        threads.append(threading.Thread(target=receive_all, args=(reader, pauses, received[index]), daemon=True))
        threads[-1].start()
    for record in records:
        if isinstance(record, list):
            channel.publish((ZERO_BLOCKS, len(record)), np.array(record, dtype=np.int32), lambda: None)
        else:
            channel.publish(encode_step(*record), record[0].host.numpy(), lambda: None)
    channel.publish((END,), np.empty(0, dtype=np.int32), lambda: None)
    for thread in threads:
        thread.join(10)
    assert received == [[record if isinstance(record, list) else comparable(*record) for record in records]] * num_readers
    deadline = time.monotonic() + 10
    while channel.positions() != [len(records) + 1] * num_readers and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert channel.positions() == [len(records) + 1] * num_readers and channel.lags() == [0] * num_readers
    channel.close()


def failed() -> None:
    raise RankError("rank 1 has ended.")


def test_failures_of_followers_are_detected() -> None:
    ends = SharedMemoryEnds(2, LIMIT)
    channel, readers = ends.channel, ends.readers
    started = time.monotonic_ns()
    readers[0].beat()
    assert channel.heartbeats_ns()[0] >= started and channel.heartbeats_ns()[1] == 0
    for _ in range(NUM_SLOTS):
        channel.publish((ZERO_BLOCKS, 1), np.zeros(1, dtype=np.int32), failed)
    readers[0].receive(0.0)
    readers[0].release()
    assert channel.positions() == [1, 0] and channel.lags() == [NUM_SLOTS - 1, NUM_SLOTS]
    with pytest.raises(RankError, match="rank 1 has ended"):
        channel.publish((END,), np.empty(0, dtype=np.int32), failed)
    channel.close()


def test_a_node_that_does_not_read_is_detected() -> None:
    channel = TcpEnds(1, 1 << 18).channel
    record = np.zeros(1 << 18, dtype=np.int32)
    with pytest.raises(RankError, match="rank 1 has ended"):
        for _ in range(100):
            channel.publish((ZERO_BLOCKS, 1), record, failed)
    channel.close()


def test_a_world_has_the_host_of_each_rank() -> None:
    assert not World().spans_hosts
    size = Mapping(tensor_parallel=2).world_size
    hosts = ("10.0.0.1", "10.0.0.2")
    assert World(rank=1, size=size, hosts=hosts).spans_hosts
    assert [address_of(rank, hosts) for rank in range(2)] == list(hosts) and address_of(1, ("a", "a")) == "127.0.0.1"


def test_ranks_with_different_addresses_join_one_world() -> None:
    """127.0.0.1 and 127.0.0.2 represent two hosts."""
    mapping, hosts, device = Mapping(tensor_parallel=2), ("127.0.0.1", "127.0.0.2"), torch.device("cpu")
    server = dist.TCPStore(address_of(0, hosts), 0, is_master=True, wait_for_workers=False)
    sums: dict[int, list[float]] = {}

    def run(rank: int) -> None:
        world = join(dist.TCPStore(address_of(0, hosts), server.port, is_master=False), rank, mapping, device, hosts=hosts)
        assert world.hosts == hosts and world.spans_hosts
        sums[rank] = world.tensor.all_reduce(torch.tensor([1.0 + rank])).tolist()
        world.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == {0: [3.0], 1: [3.0]}
