"""Copies pages between the caches of two engines with NIXL: directly between GPUs, over RDMA or NVLink, or between host memories.

An agent registers the pages of one rank. The reader of another rank copies with one-sided reads, so that the rank that is read does
nothing.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from typing import Any

import torch

from stoker.base.logging import get_logger
from stoker.core.forward_batch import KVCache
from stoker.runtime.transfer.layout import LayerRead, RankLayout
from stoker.runtime.transfer.nixl_library import create_agent
from stoker.runtime.worker_group.hosts.link import LinkError

log = get_logger(__name__)

POLL_S = 0.0005
MAX_REMOTE_AGENTS = 32  # more are connected only while transfers use them

Run = tuple[int, int, int]  # first source, first target, count
Region = tuple[int, int, int]  # address, bytes, device


class RemoteAgent:
    """The connected agent of another rank. `num_users`: readers, and transfers that could not be aborted."""

    def __init__(self, name: str, metadata: bytes, address: tuple[str, int]) -> None:
        """`address`: that of its rank."""
        self.name, self.metadata, self.address = name, metadata, address
        self.num_users = 0
        self.is_dropped = False  # it is disconnected when nothing uses it any more


class NixlAgent:
    """The agent of one rank. Several threads may use it.

    Agents of other ranks stay connected between transfers, because a connection costs more than a transfer. One is disconnected after a
    failure, when its rank has another agent after a restart, and when more than MAX_REMOTE_AGENTS are connected.
    """

    def __init__(self, caches: list[KVCache], device: torch.device) -> None:
        """Register the pages of all layers, with the package nixl installed (`check_backend`)."""
        self.caches = caches
        self.device = torch.cuda.current_device() if device.type == "cuda" else -1
        self._lock = threading.Lock()
        self._remotes: OrderedDict[bytes, RemoteAgent] = OrderedDict()  # by their metadata, the last used one last
        self._dropped: dict[bytes, RemoteAgent] = {}  # those that are still used
        self._unended: list[tuple[Any, RemoteAgent]] = []  # transfers that could not be aborted, and may still write
        self._agent: Any = create_agent(f"stoker-{uuid.uuid4().hex}")
        self.pages = [
            (cache.keys.data_ptr(), cache.values.data_ptr() if cache.values is not None else 0) for cache in caches
        ]  # fmt: skip
        regions = [
            (tensor.data_ptr(), tensor.numel() * tensor.itemsize, max(self.device, 0), "")
            for cache in caches
            for tensor in (cache.keys, cache.values)
            if tensor is not None
        ]
        self._registered = self._agent.register_memory(regions, memory_type(self.device))
        self.metadata: bytes = self._agent.get_agent_metadata()

    def open_reader(self, own: RankLayout, other: RankLayout) -> NixlReader:
        """A reader of another rank's pages. Raises LinkError if its agent cannot be used."""
        if len(other.pages) != len(other.layers):
            raise LinkError("has a NIXL agent without addresses of its pages")
        try:
            with self._lock:
                remote = self._connect((other.host, other.port), other.nixl)
        except Exception as error:
            raise LinkError(f"has a NIXL agent that cannot be reached ({error})") from None
        return NixlReader(self, remote, own, other)

    def _connect(self, address: tuple[str, int], metadata: bytes) -> RemoteAgent:
        """The agent of another rank, with one user more. The lock is held."""
        for each in [each for each in self._remotes.values() if each.address == address and each.metadata != metadata]:
            self._drop(each)  # the rank was started again
        if metadata in self._dropped:  # connected again under the same name, it would be disconnected with the dropped one
            raise RuntimeError("a transfer that has failed still uses it")
        if (remote := self._remotes.get(metadata)) is None:
            remote = self._remotes[metadata] = RemoteAgent(self._agent.add_remote_agent(metadata), metadata, address)
        remote.num_users += 1
        self._remotes.move_to_end(metadata)
        unused = [each for each in self._remotes.values() if not each.num_users]
        for each in unused[: max(0, len(self._remotes) - MAX_REMOTE_AGENTS)]:
            self._drop(each)
        return remote

    def _drop(self, remote: RemoteAgent) -> None:
        """Disconnect from another agent as soon as nothing uses it. The lock is held."""
        if not remote.is_dropped:
            remote.is_dropped = True
            self._dropped[remote.metadata] = self._remotes.pop(remote.metadata)
        if remote.num_users:
            return
        del self._dropped[remote.metadata]
        try:
            self._agent.remove_remote_agent(remote.name)
        except Exception as error:
            log.debug("a NIXL agent could not be forgotten: %s", error)

    def disconnect(self, remote: RemoteAgent, has_failed: bool) -> None:
        """`remote` has one user less. After a failure it is not used again."""
        with self._lock:
            remote.num_users -= 1
            if has_failed or remote.is_dropped:
                self._drop(remote)

    def start_read(self, name: str, local: list[Region], remote: list[Region], remote_device: int) -> Any:
        """Start to copy the regions `remote` of the agent `name` to the regions `local`. Returns a handle."""
        agent = self._agent
        with self._lock:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, memory_type(self.device)),
                agent.get_xfer_descs(remote, memory_type(remote_device)),
                name,
            )
            agent.transfer(handle)
        return handle

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR."""
        with self._lock:
            state: str = self._agent.check_xfer_state(handle)
        return state

    def release(self, handle: Any) -> None:
        """Forget a transfer. One that is not complete is aborted first."""
        with self._lock:
            self._agent.release_xfer_handle(handle)

    def abort(self, handle: Any, remote: RemoteAgent) -> bool:
        """Abort a transfer that is not complete. False if that is not possible: then it may write until `may_write` is false."""
        try:
            self.release(handle)
        except Exception as error:
            log.warning("a NIXL transfer could not be aborted: %s", error)
            with self._lock:
                remote.num_users += 1
                self._unended.append((handle, remote))
            return False
        return True

    @property
    def may_write(self) -> bool:
        """Whether a transfer that could not be aborted has not ended. One that has failed has ended if it can be released."""
        with self._lock:
            unended = list(self._unended)
        for each in unended:
            if self._has_ended(each[0]):
                with self._lock:
                    self._unended.remove(each)
                self.disconnect(each[1], has_failed=True)
        return bool(self._unended)

    def _has_ended(self, handle: Any) -> bool:
        """Whether a transfer writes no more; it is then released if possible."""
        is_done = False
        try:
            is_done = (state := self.state(handle)) == "DONE"
            if state == "PROC":
                return False
            self.release(handle)
        except Exception as error:
            log.debug("the state of a NIXL transfer: %s", error)
            return is_done
        return True

    def close(self) -> None:
        """Unregister the pages, and end the threads of the agent. They must not outlive the memory of the caches."""
        with self._lock:
            for remote in list(self._remotes.values()):
                self._drop(remote)
            self._agent.deregister_memory(self._registered)
            self._agent = self._registered = None


class NixlReader:
    """Copies pages of one rank of another engine. The caches have the same dtype and calibration."""

    def __init__(self, agent: NixlAgent, remote: RemoteAgent, own: RankLayout, other: RankLayout) -> None:
        self._agent, self._remote, self._own, self._other = agent, remote, own, other
        self._handles: list[Any] = []
        self._has_failed = self._is_closed = False

    def copy(self, reads: list[LayerRead], runs: list[Run]) -> int:
        """Start to copy heads of layers from blocks of the other rank to blocks of this one, as `block_runs`. Returns the number of bytes.

        A run is one region if all heads of both ranks are copied.
        """
        local: list[Region] = []
        remote: list[Region] = []
        for read in reads:
            self._add_regions(read, runs, local, remote)
        try:
            self._handles.append(self._agent.start_read(self._remote.name, local, remote, self._other.device))
        except Exception as error:
            self._has_failed = True
            raise LinkError(f"cannot be read with NIXL ({error})") from None
        return sum(size for _, size, _ in local)

    def _add_regions(self, read: LayerRead, runs: list[Run], local: list[Region], remote: list[Region]) -> None:
        """Append the regions of one layer."""
        num_heads = len(self._other.layers[read.layer].heads)
        cache = self._agent.caches[read.own_layer]
        own_device, other_device = max(self._agent.device, 0), max(self._other.device, 0)
        heads = find_runs(read.heads, read.own_heads)
        addresses = zip((cache.keys, cache.values), self._agent.pages[read.own_layer], self._other.pages[read.layer], strict=True)
        for pages, own_address, other_address in addresses:
            if pages is None:
                continue
            num_own = pages.shape[1]
            size = pages.shape[2] * pages.shape[3] * pages.itemsize  # of one head in one block
            is_whole = heads == [(0, 0, num_heads)] and num_heads == num_own
            for block, target, count in runs:
                if is_whole:
                    remote.append((other_address + block * num_heads * size, count * num_heads * size, other_device))
                    local.append((own_address + target * num_own * size, count * num_own * size, own_device))
                    continue
                for i in range(count):
                    for source, own, number in heads:
                        remote.append((other_address + ((block + i) * num_heads + source) * size, number * size, other_device))
                        local.append((own_address + ((target + i) * num_own + own) * size, number * size, own_device))

    def wait(self, timeout_s: float) -> None:
        """Wait until all copies are complete. Raises LinkError if one fails or takes longer."""
        deadline = time.monotonic() + timeout_s
        while self._handles:
            state = self._agent.state(self._handles[-1])
            if state == "DONE":
                self._agent.release(self._handles.pop())
            elif state != "PROC" or time.monotonic() > deadline:
                raise LinkError(f"is not read with NIXL: the state is {state} after at most {timeout_s:g} s")
            else:
                time.sleep(POLL_S)

    def close(self) -> bool:
        """Abort copies that are not complete. False if one of them may still write: the agent then has it."""
        if self._is_closed:
            return True
        self._is_closed = True
        aborted = [self._agent.abort(handle, self._remote) for handle in self._handles]
        self._agent.disconnect(self._remote, has_failed=self._has_failed or bool(self._handles))
        self._handles.clear()
        return all(aborted)


def memory_type(device: int) -> str:
    """NIXL's name of the memory of a GPU, or of the host (-1)."""
    return "VRAM" if device >= 0 else "DRAM"


def block_runs(blocks: list[int], targets: list[int]) -> list[Run]:
    """The runs of blocks to copy, in the order of `blocks`, which is not that of the prompt after blocks were released and reused."""
    pairs = sorted(zip(blocks, targets, strict=True))
    return find_runs([block for block, _ in pairs], [target for _, target in pairs])


def find_runs(sources: list[int], targets: list[int]) -> list[Run]:
    """(source, target, count) for heads or blocks that follow each other on both sides."""
    runs: list[Run] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
