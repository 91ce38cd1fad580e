"""Hosts that are network namespaces of this machine, connected by a switch in user space that can delay, stall and cut their links."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # frames with the header that says which checksums and segments the receiver must complete
NO_HOSTS = "needs root, ip (iproute2) and network namespaces"


def can_make_hosts() -> bool:
    """Whether this process may create network namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"stoker-test-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Host:
    """A namespace with the address 10.77.0.INDEX on its interface eth0."""

    def __init__(self, prefix: str, index: int, temporary: str) -> None:
        self.temporary = temporary  # its folder of temporary files
        self.name, self.address = f"{prefix}-{index}", f"10.77.0.{index}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process on this host. Its output goes to the file `log`."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": self.temporary, **environment}, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes of this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def power_off(self) -> None:
        """Kill all processes of this host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """In the block, sockets that this thread opens belong to this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as original, open(f"/run/netns/{self.name}") as ours:
            if libc.setns(ours.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(original.fileno(), _CLONE_NEWNET)


class Network:
    """Hosts, and a switch that forwards Ethernet frames between them after `delay_s` seconds. Hosts in `cut` receive and send none."""

    def __init__(self, num_hosts: int) -> None:
        self.delay_s = 0.0
        self.cut: set[int] = set()
        self._stalled_until = 0.0
        self._prefix = f"st{secrets.token_hex(2)}"
        self._stack = contextlib.ExitStack()
        temporary = [self._stack.enter_context(tempfile.TemporaryDirectory(prefix="st")) for _ in range(num_hosts)]
        self.hosts = [Host(self._prefix, index + 1, folder) for index, folder in enumerate(temporary)]
        self._ports: list[socket.socket] = []
        self._closing = threading.Event()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)
        self._thread.start()

    def stall(self, seconds: float) -> None:
        """Hold all frames back for a time, and then deliver them."""
        self._stalled_until = time.monotonic() + seconds

    def close(self) -> None:
        """Kill all processes of the hosts, and remove the namespaces."""
        self._closing.set()
        for host in self.hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.power_off()
            for process in host.processes:
                process.wait(10)
        if hasattr(self, "_thread"):
            self._thread.join()
        self._stack.close()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)

    def _make(self) -> None:
        """Create the namespaces, with one end of a pair of virtual interfaces each."""
        for index, host in enumerate(self.hosts):
            port = f"{self._prefix}p{index}"
            _ip("netns", "add", host.name)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            self._stack.callback(subprocess.run, ["ip", "link", "del", port], capture_output=True)
            _ip("link", "set", port, "up", "promisc", "on")
            Path(f"/proc/sys/net/ipv6/conf/{port}/disable_ipv6").write_text("1")
            for command in (
                ["addr", "add", f"{host.address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", host.name, *command)
            frames = self._stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
            frames.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            frames.bind((port, 0))
            frames.setblocking(False)
            self._ports.append(frames)

    def _forward(self) -> None:
        """The loop of the switch. Frames are sent to all other ports, whose hosts ignore those of other addresses."""
        waiting: list[tuple[float, int, int, bytes]] = []  # (when to send, number, port of arrival, frame)
        numbers = itertools.count()
        with selectors.DefaultSelector() as selector:
            for index, port in enumerate(self._ports):
                selector.register(port, selectors.EVENT_READ, index)
            while not self._closing.is_set():
                now = time.monotonic()
                while waiting and waiting[0][0] <= now and self._stalled_until <= now:
                    _, _, source, frame = heapq.heappop(waiting)
                    self._deliver(source, frame)
                timeout = min(max(waiting[0][0] - now, 1e-3), 0.05) if waiting else 0.05
                for key, _ in selector.select(timeout):
                    for frame in _read_all(key.fileobj):
                        heapq.heappush(waiting, (time.monotonic() + self.delay_s, next(numbers), key.data, frame))

    def _deliver(self, source: int, frame: bytes) -> None:
        if source in self.cut:
            return
        for index, port in enumerate(self._ports):
            if index != source and index not in self.cut:
                with contextlib.suppress(OSError):
                    port.send(frame)


def _read_all(port: Any) -> Iterator[bytes]:
    """The frames of hosts that wait at a port, without those that the switch itself has sent."""
    while True:
        try:
            frame, (_, _, kind, *_rest) = port.recvfrom(1 << 17)
        except BlockingIOError:
            return
        if kind != socket.PACKET_OUTGOING:
            yield frame


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
