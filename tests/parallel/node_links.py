"""Connections of two nodes over the loopback interface, and the facts of a node."""

from __future__ import annotations

import socket
import threading

from stoker.runtime.worker_group.hosts.link import Link, accept_link, open_link
from stoker.runtime.worker_group.hosts.messages import Facts

SECRET = b"s" * 32
FACTS = Facts(version="1", torch="2", engine="abc", device="cpu (x86_64)", num_nodes=3, settings={"kv_cache_tokens": 1024})


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(server, client): the ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


def link_pair() -> tuple[Link, Link]:
    """(server, client): the ends of an authenticated connection."""
    server, client = socket_pair()
    opened: list[Link] = []
    thread = threading.Thread(target=lambda: opened.append(open_link(client, SECRET)))
    thread.start()
    accepted = accept_link(server, SECRET)
    thread.join()
    return accepted, opened[0]
