"""Distinguishes a client that has only finished sending from one that has disconnected.

Both send the same TCP segment (FIN). A client that has closed its socket answers further data with a reset, so an interim response, which
clients of HTTP/1.1 ignore, finds out. The reset arrives one round trip later as the error of the socket. A response that has started, and
HTTP/1.0, do not allow interim responses; there, the next part of the response has the same effect.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHECK_S = 0.05  # first time after which the error of the socket is read; later ones are LATER_CHECK_S apart
LATER_CHECK_S = 1.0


class HalfClosed:
    """Watches a connection on which the client sends nothing more, and aborts it when the client has disconnected."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: Any, *, probe: bool) -> None:
        self._loop = loop
        self._transport = transport
        self._timer = loop.call_later(CHECK_S, self._check)
        if probe:
            transport.write(PROBE)

    def stop(self) -> None:
        """End watching, because the connection is closed."""
        self._timer.cancel()

    def _check(self) -> None:
        """Abort the connection if the client has reset it; otherwise check again later."""
        connection = self._transport.get_extra_info("socket")
        if self._transport.is_closing() or connection is None:
            return
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LATER_CHECK_S, self._check)
