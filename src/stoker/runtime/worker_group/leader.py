"""The leader's side of a worker group: starts the follower processes, publishes each step to them, and ends all when one fails."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, RankError
from stoker.base.logging import get_logger
from stoker.distributed.world import LOCAL_HOST, World, address_of, join, leader
from stoker.engine.reader import Engine
from stoker.runtime.worker.inputs import PackedStep
from stoker.runtime.worker.rank import Capacity
from stoker.runtime.worker_group.channels import CHANNELS, select_channel
from stoker.runtime.worker_group.follower import FollowTask
from stoker.runtime.worker_group.follower_process import FollowerProcess
from stoker.runtime.worker_group.records import END, ZERO_BLOCKS, encode_step, max_step_size

log = get_logger(__name__)

WATCH_INTERVAL_S = 0.2
HEARTBEAT_TIMEOUT_S = 5.0  # a process without a heartbeat for this time is stopped or stuck
STEP_TIMEOUT_S = {"cuda": 8.0, "cpu": 300.0}  # for one step of a follower; a step on a CPU may take minutes
GRACE_S = 2.0  # time for this process to raise the error of a failed rank, after which it is terminated


def rank_devices(engine: Engine, config: RuntimeConfig) -> list[torch.device]:
    """The device of each rank. Raises ConfigError unless there are as many devices as ranks. Called before anything is loaded."""
    kind, size = config.device or engine.config.target.device, engine.world_size
    mapping = engine.config.mapping
    built = f"{engine.path} is built for {size} ranks (tensor {mapping.tensor_parallel} × pipeline {mapping.pipeline_parallel})"
    if kind == "cpu":
        if config.devices is not None:
            raise ConfigError(f"devices={list(config.devices)} name GPUs, and {engine.path} runs on the CPU.", cure="Leave devices out.")
        return [torch.device("cpu")] * size
    num_devices = torch.cuda.device_count()
    chosen = tuple(range(size)) if config.devices is None else config.devices
    if len(chosen) != size:
        raise ConfigError(f"{built}, and devices={list(chosen)} names {len(chosen)}.", cure="Name one device per rank.")
    if len(set(chosen)) < size or not all(0 <= index < num_devices for index in chosen):
        cure = f"Name {size} different devices of this machine, or build the engine for fewer ranks."
        raise ConfigError(f"{built}; devices={list(chosen)}, and this machine has {num_devices}.", cure=cure)
    return [torch.device("cuda", index) for index in chosen]


class WorkerGroup:
    """The follower ranks of an engine, as the leader sees them. The leader is this process."""

    def __init__(
        self, engine: Engine, config: RuntimeConfig, capacity: Capacity, devices: list[torch.device], hosts: tuple[str, ...] = ()
    ) -> None:
        """`hosts`: the host of each rank; by default all ranks are on this one."""
        mapping, limits = engine.config.mapping, engine.config.limits
        self.num_stages = mapping.pipeline_parallel
        self._engine, self._config, self._leader = engine, config, leader(mapping)
        self._device = devices[self._leader]
        others = [rank for rank in range(mapping.world_size) if rank != self._leader]
        self._hosts = hosts or (LOCAL_HOST,) * mapping.world_size
        size = max_step_size(capacity.max_num_tokens, capacity.max_batch_size, -(-capacity.max_seq_len // limits.tokens_per_block))
        self._channel = CHANNELS.get(select_channel(self._hosts)).create(len(others), size)
        # The rendezvous of the ranks. The leader is also only a client: when a rank fails, the server is closed, and all ranks that wait
        # for it get an error immediately. It starts before anything can fail, because a client that finds no server retries for five
        # minutes.
        address = address_of(self._leader, self._hosts)
        self._rendezvous: dist.TCPStore | None = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._port = self._rendezvous.port
        self._store = dist.TCPStore(address, self._port, is_master=False)
        self._step_timeout_s = config.step_timeout_s or STEP_TIMEOUT_S[self._device.type]
        self._failure: RankError | None = None
        self._failure_raised, self._closing = threading.Event(), threading.Event()
        self._positions: dict[int, tuple[int, float]] = {}  # reader → its last position, and since when it is there
        self._followers: list[FollowerProcess] = []
        try:
            for reader, rank in enumerate(others):
                task = FollowTask(
                    engine=str(engine.path), rank=rank, reader=reader, device=str(devices[rank]), config=config, hosts=self._hosts,
                    address=address, port=self._port, channel=self._channel.address, status_fd=-1,
                )  # fmt: skip
                fd = self._channel.address.fd
                self._followers.append(FollowerProcess(task, (fd,) if fd >= 0 else ()))
        except BaseException:
            self._kill_followers()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def join(self) -> World:
        """Join the world when all followers are ready for it. Raises RankError if one of them ends before."""
        self.wait()
        return join(
            self._store, self._leader, self._engine.config.mapping, self._device, hosts=self._hosts,
            custom_all_reduce=self._config.custom_all_reduce, check=self.check,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until every follower has reported its next state. Raises RankError if one ends before."""
        for follower in self._followers:
            while not follower.has_reported(WATCH_INTERVAL_S):
                self.check()

    # StepPublisher, for the model runner.

    def publish_step(self, packed: PackedStep, all_greedy: bool) -> None:
        """Make all followers run a step."""
        self._channel.publish(encode_step(packed, all_greedy), packed.host.numpy(), self.check)

    def publish_zero_blocks(self, blocks: list[int]) -> None:
        """Make all followers zero blocks of their KV cache."""
        size = self._channel.address.record_size
        for start in range(0, len(blocks), size):
            chunk = np.array(blocks[start : start + size], dtype=np.int32)
            self._channel.publish((ZERO_BLOCKS, len(chunk)), chunk, self.check)

    # FollowerRanks, for the executor.

    def check(self) -> None:
        """Raise RankError if a rank has failed."""
        if self._failure is not None:
            self._failure_raised.set()
            raise self._failure

    def check_after_error(self) -> None:
        """Called after an error of a step: raise RankError if the failure of a rank is the cause."""
        deadline = time.monotonic() + 4 * WATCH_INTERVAL_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(WATCH_INTERVAL_S / 4)
        self.check()

    def close(self) -> None:
        """End the followers. Their logs are retained if one of them failed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._failure_raised.set()
        deadline = time.monotonic() + GRACE_S

        def give_up() -> None:
            """Raise TimeoutError after the deadline."""
            if time.monotonic() > deadline:
                raise TimeoutError

        if self._failure is None:
            with contextlib.suppress(TimeoutError):  # a rank that reads no more records is killed below
                self._channel.publish((END,), np.empty(0, dtype=np.int32), give_up)
        for follower in self._followers:
            while follower.process.poll() is None and time.monotonic() < deadline and self._failure is None:
                time.sleep(0.01)
        self._watcher.join()
        self._kill_followers()

    def _kill_followers(self) -> None:
        """Kill all followers, and close the channel."""
        for follower in self._followers:
            follower.kill()
        self._channel.close()

    # The watch thread.

    def _watch(self) -> None:
        """The loop of a thread: when a follower fails, kill all followers and store the failure, which `check` raises."""
        while not self._closing.wait(WATCH_INTERVAL_S):
            found = self._find_failure()
            if found is None:
                continue
            for follower in self._followers:
                follower.process.kill()
            self._failure = RankError(self._describe_failure(*found))
            log.critical("%s", self._failure)
            # On a CPU, collectives end when connections close or when `check` raises. A collective on a GPU never ends.
            self._rendezvous = None
            if not self._failure_raised.wait(GRACE_S) and self._device.type == "cuda":
                os._exit(1)
            return

    def _describe_failure(self, failed: FollowerProcess, reason: str) -> str:
        """Save the logs of all ranks in a new folder, and return the error message."""
        folder = Path(tempfile.gettempdir())
        with contextlib.suppress(OSError):  # the failure is reported even if the disk is full
            folder = Path(tempfile.mkdtemp(prefix="stoker-ranks-"))
            for follower in self._followers:
                follower.save_log(folder)
        return failed.describe_failure(reason, folder)

    def _find_failure(self) -> tuple[FollowerProcess, str] | None:
        """(follower, reason) of the first follower that has ended, sends no heartbeats or does not proceed; None if all are well."""
        now = time.monotonic_ns()
        heartbeats, lags, positions = self._channel.heartbeats_ns(), self._channel.lags(), self._channel.positions()
        for reader, follower in enumerate(self._followers):
            if follower.process.poll() is not None:
                return follower, follower.exit_reason
            if heartbeats[reader] and (now - heartbeats[reader]) / 1e9 > HEARTBEAT_TIMEOUT_S:
                return follower, f"has sent no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s"
            if self._stalled_s(reader, positions[reader], lags[reader]) > self._step_timeout_s:
                return follower, "is stuck in a step"
        return None

    def _stalled_s(self, reader: int, position: int, lag: int) -> float:
        """The seconds for which a reader has been at `position` although it has further records to read."""
        now = time.monotonic()
        known = self._positions.get(reader)
        if known is None or known[0] != position or lag == 0:
            self._positions[reader] = (position, now)
            return 0.0
        return now - known[1]
