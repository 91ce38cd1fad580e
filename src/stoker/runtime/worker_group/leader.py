"""The leader's side of a worker group: starts the follower processes, publishes each step to them, and ends all when one fails."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from stoker.base.config import RuntimeConfig
from stoker.base.errors import RankError
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings, describe_placement, leader, place_ranks
from stoker.base.start_times import StartReport, StartTimes
from stoker.distributed.world import LOCAL_HOST, World, address_of, join
from stoker.engine.reader import Engine
from stoker.runtime.transfer.address import WILDCARDS, parse_transfer
from stoker.runtime.transfer.layout import RankLayout
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.inputs import PackedStep, Shape
from stoker.runtime.worker_group.channels.channel import Numbers
from stoker.runtime.worker_group.channels.tcp import TcpChannel
from stoker.runtime.worker_group.follower import start_key
from stoker.runtime.worker_group.follower_process import WaitingFollowers
from stoker.runtime.worker_group.hosts.link import LinkError
from stoker.runtime.worker_group.hosts.messages import JOINED, JoinAnswer, describe_node, encode
from stoker.runtime.worker_group.hosts.remote_node import RemoteNode
from stoker.runtime.worker_group.hosts.rendezvous import Rendezvous, node_addresses
from stoker.runtime.worker_group.local_ranks import FailedRank, LocalRanks, RankSetup
from stoker.runtime.worker_group.records import END, PROFILE, ZERO_BLOCKS, encode_capture, encode_parts, encode_step, max_step_size

log = get_logger(__name__)

WATCH_INTERVAL_S = 0.2
STEP_TIMEOUT_S = {"cuda": 8.0, "cpu": 300.0}  # for one step of a follower; a step on a CPU may take minutes
CAUSE_WAIT_S = 1.0  # for the report of another node, which names the rank that failed first
GRACE_S = 2.0  # time for this process to raise the error of a failed rank, after which it is terminated
ONE_NODE = NodeSettings()


class WorkerGroup:
    """The follower ranks of an engine, as the leader sees them. The leader is this process."""

    def __init__(
        self, engine: Engine, config: RuntimeConfig, capacity: Capacity, devices: dict[int, torch.device], nodes: NodeSettings = ONE_NODE,
        waiting: WaitingFollowers | None = None,
    ) -> None:  # fmt: skip
        """`devices`: of each rank on this node. `waiting`: processes of followers that are running already.

        Waits until the other nodes have joined, and raises RankError if one does not.
        """
        mapping, limits = engine.config.mapping, engine.config.limits
        self.num_stages = mapping.pipeline_parallel
        self._engine, self._config, self._leader = engine, config, leader(mapping)
        self._device = devices[self._leader]
        self._step_timeout_s = config.step_timeout_s or STEP_TIMEOUT_S[self._device.type]
        num_blocks = -(-capacity.max_seq_len // limits.tokens_per_block)
        self.record_size = max_step_size(capacity.max_num_tokens, capacity.max_batch_size, num_blocks, mapping.data_parallel)
        self._world: World | None = None  # that this process has joined
        self._failure: RankError | None = None
        self._failure_raised, self._closing = threading.Event(), threading.Event()
        self._first_failure_at: float | None = None
        self._num_awaited = 0
        placement = place_ranks(mapping, nodes.num_nodes)
        self._remote: list[RemoteNode] = []
        self._hosts = (LOCAL_HOST,) * mapping.world_size
        if nodes.num_nodes > 1:
            facts = describe_node(engine, config, list(devices.values()), nodes.num_nodes)
            self._remote = Rendezvous(nodes, facts).gather()
            addresses = node_addresses(self._remote)
            self._hosts = tuple(addresses[node] for node in placement)
            for line in describe_placement(mapping, placement, self._hosts):
                log.info("%s", line)
        self._nodes = TcpChannel(self._remote, self.record_size)
        # The rendezvous of the collectives. The leader is also only a client: when a rank fails, the server is closed, and all ranks that
        # wait for it get an error immediately. It starts before anything can fail, because a client that finds no server retries for five
        # minutes.
        address = address_of(self._leader, self._hosts)
        self._server: dist.TCPStore | None = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        prefix = secrets.token_hex(16)
        self._store = dist.PrefixStore(prefix, dist.TCPStore(address, self._server.port, is_master=False))
        setup = RankSetup(
            engine=str(engine.path), config=config, devices=devices, hosts=self._hosts, address=address, port=self._server.port,
            store_prefix=prefix, record_size=self.record_size, step_timeout_s=self._step_timeout_s,
        )  # fmt: skip
        try:
            self._send_answers(setup)
            followers = [rank for rank, node in enumerate(placement) if node == 0 and rank != self._leader]
            self.local_ranks = [self._leader, *followers]
            self._local = LocalRanks(setup, followers, waiting or WaitingFollowers())
        except BaseException:
            self._nodes.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _send_answers(self, setup: RankSetup) -> None:
        """Send what the ranks of the other nodes need."""
        answer = JoinAnswer(
            hosts=setup.hosts, address=setup.address, port=setup.port, store_prefix=setup.store_prefix,
            record_size=setup.record_size, step_timeout_s=setup.step_timeout_s,
        )  # fmt: skip
        for node in self._remote:
            try:
                node.link.send(JOINED, encode(answer))
            except LinkError as error:
                node.fail(str(error))

    def join(self, times: StartTimes) -> World:
        """Join the world, after all followers have reported that they are ready for it (`wait`). Raises RankError if one ends before."""
        self._world = join(
            self._store, self._leader, self._engine.config.mapping, self._device, hosts=self._hosts,
            custom_all_reduce=self._config.custom_all_reduce, check=self.check, times=times,
        )  # fmt: skip
        return self._world

    def transfer_layouts(self) -> list[RankLayout]:
        """Of each follower that serves transfers: where it listens, and what it holds. All ranks are on this host."""
        ranks = (rank for rank in range(self._engine.config.mapping.world_size) if rank != self._leader)
        layouts = (msgspec.json.decode(self._store.get(f"transfer{rank}"), type=RankLayout) for rank in ranks)
        host = parse_transfer(self._config.transfer or "")[0]
        return [msgspec.structs.replace(layout, host=LOCAL_HOST if host in WILDCARDS else host) for layout in layouts]

    def start_reports(self) -> list[StartReport]:
        """The report of the start of each follower on all nodes, after all ranks are ready."""
        ranks = (rank for rank in range(self._engine.config.mapping.world_size) if rank != self._leader)
        return [msgspec.json.decode(self._store.get(start_key(rank)), type=StartReport) for rank in ranks]

    def wait(self) -> None:
        """Wait until every follower has reported its next state. Raises RankError if one ends before."""
        self._num_awaited += 1
        while self._num_reported() < self._num_awaited:
            self.check()
            time.sleep(WATCH_INTERVAL_S / 10)

    def _num_reported(self) -> int:
        """The number of states that every follower on every node has reported."""
        return min([self._local.num_reported(), *(node.status.num_reported for node in self._remote)])

    # StepPublisher, for the model runner.

    def publish_step(self, packed: list[PackedStep], all_greedy: bool) -> None:
        """Make all followers run a step: the same, or with several `packed` each its own."""
        if len(packed) == 1:
            self._publish(encode_step(packed[0], all_greedy), packed[0].host.numpy())
        else:
            self._publish(*encode_parts(packed, all_greedy))

    def publish_zero_blocks(self, blocks: list[int]) -> None:
        """Make all followers zero blocks of their KV cache."""
        for start in range(0, len(blocks), self.record_size):
            chunk = np.array(blocks[start : start + self.record_size], dtype=np.int32)
            self._publish((ZERO_BLOCKS, len(chunk)), chunk)

    def publish_capture(self, shape: Shape) -> None:
        """Make all followers perform the next part of the capture of a shape."""
        self._publish(encode_capture(shape), np.empty(0, dtype=np.int32))

    def publish_profile(self, number: int, *, start: bool) -> None:
        """Make all followers start or stop profile `number`."""
        self._publish((PROFILE, os.getpid(), number, start), np.empty(0, dtype=np.int32))

    def _publish(self, header: tuple[int, ...], numbers: Numbers) -> None:
        """Publish a record to the other nodes and to the followers on this node."""
        self._nodes.publish(header, numbers, self.check)
        self._local.publish(header, numbers, self.check)

    # FollowerRanks, for the executor.

    def check(self) -> None:
        """Raise RankError if a rank has failed."""
        if self._failure is not None:
            self._failure_raised.set()
            raise self._failure

    def check_after_error(self) -> None:
        """Called after an error of a step: raise RankError if the failure of a rank is the cause."""
        deadline = time.monotonic() + CAUSE_WAIT_S + 4 * WATCH_INTERVAL_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(WATCH_INTERVAL_S / 4)
        self.check()

    def close(self, failure: str = "") -> None:
        """End the followers, then leave the world. `failure`: the error of this process that is the reason.

        Logs are retained if a follower failed.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._failure_raised.set()
        deadline = time.monotonic() + GRACE_S
        for node in self._remote if failure and self._failure is None else ():
            node.stop(f"node 0 failed: {failure}")
        if self._failure is None:
            with contextlib.suppress(TimeoutError):  # a node that reads no more ends when its connection is closed
                self._nodes.publish((END,), np.empty(0, dtype=np.int32), lambda: _give_up_after(deadline))
            self._local.end(deadline)
            self._watcher.join()
        else:
            self._watcher.join()
            self._local.kill()
        self._nodes.close()
        if self._world is not None:
            _leave(self._world)

    # The watch thread.

    def _watch(self) -> None:
        """The loop of a thread: when a rank or a node fails, kill all followers and store the failure, which `check` raises."""
        while not self._closing.wait(WATCH_INTERVAL_S):
            message = self._find_failure()
            if message is None:
                for node in self._remote:
                    node.beat()
                continue
            self._local.terminate()
            self._failure = RankError(message)
            log.critical("%s", self._failure)
            for node in self._remote:
                node.stop(message)
            # On a CPU, collectives end when connections close or when `check` raises. A collective on a GPU never ends, and a connection to
            # a host that cannot be reached is never closed.
            self._server = None
            if not self._failure_raised.wait(GRACE_S) and (self._device.type == "cuda" or self._remote):
                os._exit(1)
            return

    def _find_failure(self) -> str | None:
        """The message about the rank or node that failed first; None if all are well."""
        local, remote = self._local.find_failure(), [node for node in self._remote if node.failure is not None]
        if local is None and not remote:
            return None
        self._first_failure_at = self._first_failure_at or time.monotonic()
        may_wait = bool(self._remote) and time.monotonic() < self._first_failure_at + CAUSE_WAIT_S
        found = first_failure(local, remote, may_wait=may_wait)
        return self._local.describe_failure(found) if isinstance(found, FailedRank) else f"{found.failure}." if found is not None else None


def first_failure(local: FailedRank | None, remote: list[RemoteNode], *, may_wait: bool) -> FailedRank | RemoteNode | None:
    """The failure to report: a rank of this node, or one of the nodes `remote`, which have failed. None: wait for another report.

    A rank that dies closes its connections, and its peers on other nodes may end before the report about it arrives.
    """
    if local is not None and local.is_cause:
        return local
    if cause := next((node for node in remote if node.is_cause), None):
        return cause
    return None if may_wait else local or remote[0]


def _leave(world: World) -> None:
    """Close a world that no other rank uses any more. A thread does so, because a GPU may still wait for a rank that has failed."""
    closing = threading.Thread(target=world.close, name="leave-world", daemon=True)
    closing.start()
    closing.join(GRACE_S)
    if closing.is_alive():
        log.warning("rank %d has not left the groups of its engine within %g s", world.rank, GRACE_S)


def _give_up_after(deadline: float) -> None:
    """Raise TimeoutError after the monotonic time `deadline`."""
    if time.monotonic() > deadline:
        raise TimeoutError
