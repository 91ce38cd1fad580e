"""The listening socket of a rendezvous. This module imports no torch, so that the command line checks the address first."""

from __future__ import annotations

import contextlib
import socket

from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings

MAX_PENDING = 32  # connections whose handshake is not complete; further ones are closed


def listen(nodes: NodeSettings) -> socket.socket:
    """A socket that listens at the port of the rendezvous. Raises ConfigError if the host is not this one or the port cannot be used.

    It listens on all addresses, because the host's own name often resolves to a loopback address there.
    """
    host, port = nodes.address
    try:
        family = _local_family(host)
    except OSError as error:
        raise ConfigError(f"rendezvous={nodes.rendezvous} is refused: {error.strerror}.", cure="Use an address of node 0.") from None
    if family is None:
        raise ConfigError(
            f"rendezvous={nodes.rendezvous} is refused: {host} is no address of this host, which is node 0.",
            cure=f"Use an address of this host, or 0.0.0.0:{port} here if the others reach it through a router that translates addresses.",
        )
    try:
        return socket.create_server(("", port), family=family, backlog=MAX_PENDING)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"rendezvous={nodes.rendezvous} cannot be used: {reason}.", cure="Stop the other process, or use another port."
        ) from None


def _local_family(host: str) -> socket.AddressFamily | None:
    """The family of the first address of `host` that a socket can be bound to; None if this machine has none of them.

    Raises OSError if the host is unknown.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as unbound:
            unbound.bind(address)
            return family
    return None
