"""Reports the state of the server to systemd, with the protocol of sd_notify(3): datagrams of NAME=VALUE lines to a Unix socket.

A unit with `Type=notify` has the variable NOTIFY_SOCKET, and with `WatchdogSec=` also WATCHDOG_USEC. Without them nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable

from stoker.base import env


class ServiceManager:
    """systemd, if it has started this process."""

    def __init__(self) -> None:
        self._address = env.text("NOTIFY_SOCKET")

    @property
    def exists(self) -> bool:
        """Whether systemd has started this process."""
        return bool(self._address)

    @property
    def watchdog_s(self) -> float | None:
        """The time after which systemd ends a process that has sent no `WATCHDOG=1`. None if it expects none of this process."""
        microseconds, pid = env.text("WATCHDOG_USEC"), env.text("WATCHDOG_PID")
        if not self._address or not microseconds.isdigit() or int(microseconds) == 0 or pid not in ("", str(os.getpid())):
            return None
        return int(microseconds) / 1e6

    def report(self, status: str) -> None:
        """Send a line that `systemctl status` shows."""
        self._send(f"STATUS={_line(status)}")

    def ready(self, status: str) -> None:
        """The server accepts requests: the start of the unit, or its reload, is complete."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """The server reads its files again. `ready` ends that."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The server has begun to stop."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    async def keep_alive(self, check: Callable[[], Awaitable[None]]) -> None:
        """Send `WATCHDOG=1` twice in the time of the watchdog, each time after `check` has returned. Returns at once without a watchdog."""
        if (watchdog_s := self.watchdog_s) is None:
            return
        while True:
            await check()
            self._send("WATCHDOG=1")
            await asyncio.sleep(watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        """Send one datagram. A socket that does not exist or whose queue is full is no error."""
        if not self._address:
            return
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), name)


def _line(text: str) -> str:
    """The text without line breaks, which would begin another variable."""
    return " ".join(text.split())
