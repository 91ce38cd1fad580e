"""The transfer address of an executor, as settings and reports contain it."""

from __future__ import annotations

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.nodes import split_address

WILDCARDS = ("0.0.0.0", "::")


class TransferAddress(msgspec.Struct, frozen=True):
    """Where other executors read KV cache blocks. A wildcard host stands for the host of the server."""

    role: str
    host: str
    port: int


def parse_transfer(text: str) -> tuple[str, int]:
    """The host and port of HOST:PORT or [IPV6]:PORT; port 0 is any free one. Raises ConfigError."""
    if (address := split_address(text)) is None:
        raise ConfigError(f"transfer={text!r} is refused.", cure="Write HOST:PORT, such as 0.0.0.0:5600; port 0 is any free one.")
    return address
