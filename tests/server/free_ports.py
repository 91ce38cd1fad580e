"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket

# Below the ports that systems give to connections and to sockets without a port (on Linux from 32768): such a port would be free when a
# test looks, and could be in use when its server begins to listen.
LOWEST, HIGHEST = 20_000, 29_999

_chosen: set[int] = set()  # by this process


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that no socket uses, another one at each call. Tests that run at the same time choose at random."""
    while True:
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        if port in _chosen:
            continue
        try:
            socket.create_server((host, port)).close()
        except OSError:
            continue
        _chosen.add(port)
        return port
