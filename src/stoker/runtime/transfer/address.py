"""The transfer address of an executor, as settings and reports contain it."""

from __future__ import annotations

import msgspec

from stoker.base.errors import ConfigError

WILDCARDS = ("0.0.0.0", "::")


class TransferAddress(msgspec.Struct, frozen=True):
    """Where other executors read KV cache blocks. A wildcard host stands for the host of the server."""

    role: str
    host: str
    port: int


def parse_transfer(text: str) -> tuple[str, int]:
    """The host and port of HOST:PORT or [IPV6]:PORT; port 0 is any free one. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536):
        raise ConfigError(f"transfer={text!r} is refused.", cure="Write HOST:PORT, such as 0.0.0.0:5600; port 0 is any free one.")
    return host, int(port)
