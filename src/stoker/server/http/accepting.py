"""Accepts connections of a listening socket that several processes share.

Without free descriptors, libuv accepts the connections that wait and closes them, so that their clients see a reset although another
process could serve them. Here they stay in the queue of the socket until a process has descriptors, as with asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable

from stoker.base.logging import get_logger

log = get_logger(__name__)

MAX_ACCEPTED = 64  # connections per iteration of the event loop; requests in progress continue between two batches
PAUSE_S = 0.1  # without free descriptors or memory
LOG_PERIOD_S = 10.0
HANDSHAKE_S = 1.0  # for TLS handshakes in progress when the server stops
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Creates a protocol with `create` for each connection of `listener`, until `close`. `on_exhausted` is called for each pause."""

    def __init__(
        self,
        listener: socket.socket,
        create: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        on_exhausted: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._create = create
        self._tls = tls
        self._on_exhausted = on_exhausted
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s = -LOG_PERIOD_S
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more connections. The listening socket stays open."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Return when no connection is between its acceptance and its protocol. TLS handshakes end after HANDSHAKE_S."""
        if self._connecting:
            _, unfinished = await asyncio.wait(self._connecting, timeout=HANDSHAKE_S)
            for task in unfinished:
                task.cancel()

    def _accept(self) -> None:
        """Accept the connections that wait, at most MAX_ACCEPTED of them."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # the client has disconnected while it waited (ECONNABORTED and the network errors of accept(2))
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        """Pass a connection to a new protocol. A client that fails the TLS handshake or disconnects is ignored."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._create, connection, ssl=self._tls)

    def _pause(self, error: OSError) -> None:
        """Stop accepting for PAUSE_S. Other processes accept in the meantime."""
        self._on_exhausted()
        if time.monotonic() - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = time.monotonic()
            log.error("no connection can be accepted: %s. Connections wait; raise the limit of open files (ulimit -n).", error.strerror)
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)
