"""The leader's side of the other ranks: starts their processes, tells them each step, and ends everything when one of them fails."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, RankError
from stoker.base.logging import get_logger
from stoker.distributed.world import World, join, leader
from stoker.engine.reader import Engine
from stoker.runtime.worker.inputs import Packed
from stoker.runtime.worker.rank import Capacity
from stoker.runtime.worker_group.follower import FollowTask
from stoker.runtime.worker_group.shared_memory import END, FORGET, Ring, encode_step, step_size

log = get_logger(__name__)

WATCH_S = 0.2
HANG_S = 5.0  # without a beat, a process is stopped or stuck
STALL_S = {"cuda": 8.0, "cpu": 300.0}  # in one step: a CPU may compute for minutes, a GPU never does
KEPT_BYTES = 1 << 24  # of each rank's log, when one failed
GRACE_S = 2.0  # after a rank failed, this process has so long to notice before it is ended


def rank_devices(engine: Engine, config: RuntimeConfig) -> list[torch.device]:
    """Each rank's device. Raises ConfigError when there are not as many devices as ranks; nothing has been loaded then."""
    kind, size = config.device or engine.config.target.device, engine.world_size
    mapping = engine.config.mapping
    built = f"{engine.path} is built for {size} ranks (tensor {mapping.tensor_parallel} × pipeline {mapping.pipeline_parallel})"
    if kind == "cpu":
        if config.devices is not None:
            raise ConfigError(f"devices={list(config.devices)} name GPUs, and {engine.path} runs on the CPU.", cure="Leave it out.")
        return [torch.device("cpu")] * size
    there = torch.cuda.device_count()
    chosen = tuple(range(size)) if config.devices is None else config.devices
    if len(chosen) != size:
        raise ConfigError(f"{built}, and devices={list(chosen)} names {len(chosen)}.", cure="Name one device a rank.")
    if len(set(chosen)) < size or not all(0 <= index < there for index in chosen):
        cure = f"Name {size} different ones that are here, or build for fewer."
        raise ConfigError(f"{built}; devices={list(chosen)}, and {there} are here.", cure=cure)
    return [torch.device("cuda", index) for index in chosen]


class Follower:
    """One rank's process."""

    def __init__(self, task: FollowTask, pass_fds: tuple[int, ...]) -> None:
        self.rank, self.device = task.rank, task.device
        # Nameless: it goes with the processes, however they end.
        self._log = tempfile.TemporaryFile(prefix="stoker-rank-")  # noqa: SIM115
        self._status, theirs = os.pipe()
        task.status_fd = theirs
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stoker.runtime.worker_group.follower"], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
                bufsize=0, pass_fds=(*pass_fds, theirs), start_new_session=True, env=env.child_environment(),
            )  # fmt: skip
        except BaseException:
            os.close(self._status)
            self._log.close()
            raise
        finally:
            os.close(theirs)
        data = msgspec.msgpack.encode(task)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already: the watch finds that, and says so
            self.process.stdin.write(len(data).to_bytes(8, "little") + data)

    def has_told(self, timeout_s: float) -> bool:
        """Whether it told its next state; a process that ended tells nothing more."""
        ready, _, _ = select.select([self._status], [], [], timeout_s)
        return bool(ready) and os.read(self._status, 1) != b""

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self._status)
        self._log.close()

    def keep_log(self, folder: Path) -> None:
        """Write the end of what it printed to a file that stays."""
        (folder / f"rank{self.rank}.log").write_bytes(self._printed())

    def describe(self, what: str, folder: Path) -> str:
        """What happened to it, with the end of its log."""
        lines = self._printed().decode(errors="replace").strip().splitlines()
        last = f" It ends with: {lines[-1]}" if lines else ""
        return f"rank {self.rank} on {self.device} {what}; its log is {folder / f'rank{self.rank}.log'}.{last}"

    def _printed(self) -> bytes:
        """Read at a place: it writes at the file's own."""
        log = self._log.fileno()
        return os.pread(log, KEPT_BYTES, max(0, os.fstat(log).st_size - KEPT_BYTES))

    @property
    def ending(self) -> str:
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class Ranks:
    """The other ranks of an engine, as the leader has them."""

    def __init__(self, engine: Engine, config: RuntimeConfig, capacity: Capacity, devices: list[torch.device]) -> None:
        mapping, limits = engine.config.mapping, engine.config.limits
        self.num_stages = mapping.pipeline_parallel
        self._engine, self._config, self._leader = engine, config, leader(mapping)
        self._device = devices[self._leader]
        others = [rank for rank in range(mapping.world_size) if rank != self._leader]
        size = step_size(capacity.max_num_tokens, capacity.max_batch_size, -(-capacity.max_seq_len // limits.tokens_per_block))
        self._ring = Ring.create(len(others), size)
        # Where the ranks meet. The leader, too, comes as a guest: when a rank fails this goes, and who waits there is told at once. It
        # comes before anything can fail: who finds nobody there looks for five minutes.
        self._meeting: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._port = self._meeting.port
        self._guest = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        self._stall_s = config.step_timeout_s or STALL_S[self._device.type]
        self._failure: RankError | None = None
        self._noticed, self._closing = threading.Event(), threading.Event()
        self._stalls: dict[int, tuple[int, float]] = {}
        self._followers: list[Follower] = []
        try:
            for reader, rank in enumerate(others):
                task = FollowTask(
                    engine=str(engine.path), rank=rank, reader=reader, device=str(devices[rank]), config=config, port=self._port,
                    ring_fd=self._ring.fd, num_readers=len(others), slot_size=size, status_fd=-1,
                )  # fmt: skip
                self._followers.append(Follower(task, (self._ring.fd,)))
        except BaseException:
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def join(self) -> World:
        """Meet the other ranks, once they are all there. Raises RuntimeError when one of them ends meanwhile."""
        self.wait()
        custom = self._config.custom_all_reduce
        return join(self._guest, self._leader, self._engine.config.mapping, self._device, custom_all_reduce=custom, check=self.check)

    def wait(self) -> None:
        """Until every follower told its next state. Raises RankError when one ends before."""
        for follower in self._followers:
            while not follower.has_told(WATCH_S):
                self.check()

    # What the runner tells.

    def step(self, packed: Packed, all_greedy: bool) -> None:
        self._ring.publish(encode_step(packed, all_greedy), packed.host.numpy(), self.check)

    def forget(self, blocks: list[int]) -> None:
        most = self._ring.slot_size
        for start in range(0, len(blocks), most):
            part = np.array(blocks[start : start + most], dtype=np.int32)
            self._ring.publish((FORGET, len(part)), part, self.check)

    # What the executor asks.

    def check(self) -> None:
        """Raise RankError when a rank failed."""
        if self._failure is not None:
            self._noticed.set()
            raise self._failure

    def blame(self) -> None:
        """After an error of a step: raise RankError when a rank's failure is behind it."""
        deadline = time.monotonic() + 4 * WATCH_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(WATCH_S / 4)
        self.check()

    def close(self) -> None:
        """End the followers; their logs stay when one failed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._noticed.set()
        deadline = time.monotonic() + GRACE_S

        def give_up() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        if self._failure is None:
            with contextlib.suppress(TimeoutError):  # a rank that reads nothing more is killed below
                self._ring.publish((END,), np.empty(0, dtype=np.int32), give_up)
        for follower in self._followers:
            while follower.process.poll() is None and time.monotonic() < deadline and self._failure is None:
                time.sleep(0.01)
        self._watcher.join()
        self._end()

    def _end(self) -> None:
        for follower in self._followers:
            follower.kill()
        self._ring.close()

    # The watch.

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_S):
            found = self._find_failure()
            if found is None:
                continue
            for follower in self._followers:
                follower.process.kill()
            self._failure = RankError(self._described(*found))
            log.critical("%s", self._failure)
            # Who waits for them on a CPU is told by the connections or by `check`; a GPU waits for ever.
            self._meeting = None
            if not self._noticed.wait(GRACE_S) and self._device.type == "cuda":
                os._exit(1)
            return

    def _described(self, failed: Follower, what: str) -> str:
        """What happened, once every rank's log is kept where it can be read later."""
        folder = Path(tempfile.gettempdir())
        with contextlib.suppress(OSError):  # a full disk keeps no logs, and no failure from being told
            folder = Path(tempfile.mkdtemp(prefix="stoker-ranks-"))
            for follower in self._followers:
                follower.keep_log(folder)
        return failed.describe(what, folder)

    def _find_failure(self) -> tuple[Follower, str] | None:
        now = time.monotonic_ns()
        beats, lags = self._ring.beats_ns(), self._ring.lags()
        for reader, follower in enumerate(self._followers):
            if follower.process.poll() is not None:
                return follower, follower.ending
            if beats[reader] and (now - beats[reader]) / 1e9 > HANG_S:
                return follower, f"shows no life for {HANG_S:g} s"
            if self._stalled_s(reader, lags[reader]) > self._stall_s:
                return follower, "is stuck in a step"
        return None

    def _stalled_s(self, reader: int, lag: int) -> float:
        """For how long a reader has been at the same slot while more wait."""
        position = self._ring.position(reader)
        now = time.monotonic()
        known = self._stalls.get(reader)
        if known is None or known[0] != position or lag == 0:
            self._stalls[reader] = (position, now)
            return 0.0
        return now - known[1]
