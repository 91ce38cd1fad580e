"""Distinguishes a client that has only finished sending from one that has disconnected.

Both send the same TCP segment (FIN), but a client that has closed its socket answers further data with a reset, which arrives one round
trip later as the error of the socket. Therefore bytes that do not change the response are sent as a probe (`Cycle.probe`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

CHECK_S = 0.05  # first time after which the error of the socket is read; it doubles up to MAX_CHECK_S
MAX_CHECK_S = 2.0
MAX_PROBES = 4  # clients accept a limited number of interim responses


class HalfClosed:
    """Watches a connection on which the client sends nothing more, and aborts it when the client has disconnected.

    `probe` returns the bytes of a probe, which may be empty.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: Any, probe: Callable[[], bytes]) -> None:
        self._loop = loop
        self._transport = transport
        self._probe = probe
        self._num_probes = 0
        self._delay_s = CHECK_S
        self._send_probe()
        self._timer = loop.call_later(self._delay_s, self._check)

    def stop(self) -> None:
        """End watching, because the connection is closed."""
        self._timer.cancel()

    def _send_probe(self) -> None:
        """Send a probe, unless MAX_PROBES were sent."""
        if self._num_probes < MAX_PROBES and (data := self._probe()):
            self._num_probes += 1
            self._transport.write(data)

    def _check(self) -> None:
        """Abort the connection if the client has reset it; otherwise send another probe, and check again later."""
        connection = self._transport.get_extra_info("socket")
        if self._transport.is_closing() or connection is None:
            return
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        self._delay_s = min(2 * self._delay_s, MAX_CHECK_S)
        if self._delay_s == MAX_CHECK_S:
            self._send_probe()
        self._timer = self._loop.call_later(self._delay_s, self._check)
