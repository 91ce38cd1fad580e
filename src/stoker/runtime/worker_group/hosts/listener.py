"""The listening socket of a rendezvous. This module imports no torch, so that the command line checks the address first."""

from __future__ import annotations

import socket

from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings

MAX_PENDING = 32  # connections whose handshake is not complete; further ones are closed


def listen(nodes: NodeSettings) -> socket.socket:
    """A socket that listens at the port of the rendezvous. Raises ConfigError if the host is unknown or the port cannot be used.

    It listens on all addresses, because the host's own name often resolves to a loopback address there.
    """
    host, port = nodes.address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(f"rendezvous={nodes.rendezvous} is refused: {error.strerror}.", cure="Use an address of node 0.") from None
    try:
        return socket.create_server(("", port), family=family, backlog=MAX_PENDING)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"rendezvous={nodes.rendezvous} cannot be used: {reason}.", cure="Stop the other process, or use another port."
        ) from None
