"""Settings of `stoker route`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from stoker.base.config import check_range
from stoker.base.errors import ConfigError
from stoker.router.core.settings import RoutingSettings

MAX_REPLICAS = 4096
_HEADER = re.compile(r"[a-z0-9-]{1,64}")


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the router's server. A port of None is not opened."""

    replicas: tuple[str, ...] = ()  # URLs
    replicas_file: str | None = None  # a file with one URL a line, read again when it changes
    host: str = "127.0.0.1"
    http_port: int = 8080  # 0: any free port
    grpc_port: int | None = None
    tokenizer: str | None = None  # directory of the tokenizer of the replicas; None: prefixes of text
    api_keys: tuple[str, ...] = ()  # that clients must send; empty: the keys of clients are passed on to the replicas. Never printed
    replica_api_key: str | None = None  # for health checks, and for requests if api_keys are set. Never printed
    admin_key: str | None = None  # for the routes under /router. None: they are open if the host is a loopback address, else closed
    session_header: str = "x-session-id"
    tenant_header: str = "x-tenant-id"
    max_request_bytes: int = 16 << 20
    connect_timeout_s: float = 2.0
    health_interval_s: float = 1.0
    health_timeout_s: float = 2.0
    tokenize_timeout_s: float = 0.25  # a prompt that takes longer is routed without its tokens
    drain_timeout_s: float = 30.0  # limit for requests in flight when the router stops
    access_log: bool = True
    tls_certificate: str | None = None
    tls_key: str | None = None
    routing: RoutingSettings = RoutingSettings()

    def __post_init__(self) -> None:
        for url in self.replicas:
            check_url(url)
        if duplicate := next((url for i, url in enumerate(self.replicas) if url in self.replicas[:i]), None):
            raise ConfigError(f"the replica {duplicate!r} is given twice.", cure="Name each replica once.")
        if len(self.replicas) > MAX_REPLICAS:
            raise ConfigError(f"{len(self.replicas)} replicas are given and the limit is {MAX_REPLICAS}.", cure="Use several routers.")
        for name in ("http_port", "grpc_port"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, 65535)
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ConfigError(f"grpc_port={self.grpc_port} is refused: http_port is the same port.", cure="Change one of them.")
        check_range("max_request_bytes", self.max_request_bytes, 1 << 10, 1 << 32)
        for name in ("connect_timeout_s", "health_interval_s", "health_timeout_s", "tokenize_timeout_s"):
            if not 0.001 <= getattr(self, name) <= 3600:
                raise ConfigError(f"{name}={getattr(self, name)} is refused.", cure="Use seconds, from 0.001 to 3600.")
        if not 0 <= self.drain_timeout_s <= 86400:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s} is refused.", cure="Use seconds, from 0 to 86400.")
        for name in ("session_header", "tenant_header"):
            if not _HEADER.fullmatch(getattr(self, name)):
                cure = "Use a name in lower case, such as x-session-id."
                raise ConfigError(f"{name}={getattr(self, name)!r} is no name of a header.", cure=cure)
        for key in (*self.api_keys, self.replica_api_key, self.admin_key):
            if key is not None and (len(key) < 8 or not key.isascii() or not key.isprintable()):
                raise ConfigError("an API key is refused.", cure="Use at least 8 printable ASCII characters.")
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_certificate" if self.tls_certificate is None else "tls_key"
            raise ConfigError(f"{missing} is not set.", cure="HTTPS needs both the certificate and its key.")

    @property
    def admin_is_open(self) -> bool:
        """Whether the routes under /router need no key."""
        return self.admin_key is None and self.host in ("127.0.0.1", "::1", "localhost")


def check_url(url: str) -> str:
    """The URL of a replica. Raises ConfigError unless it is http(s)://HOST[:PORT]."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:  # a port that is no number below 65536, or unbalanced brackets
        port_is_valid = False
    if not port_is_valid or parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigError(f"the replica {url[:200]!r} is refused.", cure="Use an address such as http://10.0.0.5:8000.")
    return url


def read_replicas(text: str, file: str) -> list[str]:
    """The URLs in the text of a replicas file: one a line; empty lines and lines that start with # are ignored. Raises ConfigError."""
    urls = [line for raw in text.splitlines() if (line := raw.strip()) and not line.startswith("#")]
    for number, url in enumerate(urls):
        try:
            check_url(url)
        except ConfigError as error:
            raise ConfigError(f"replicas_file={file}: {error.message}", cure=error.cure) from None
        if url in urls[:number]:
            raise ConfigError(f"replicas_file={file}: the replica {url!r} is given twice.", cure="Name each replica once.")
    if len(urls) > MAX_REPLICAS:
        raise ConfigError(f"replicas_file={file}: {len(urls)} replicas, and the limit is {MAX_REPLICAS}.", cure="Use several routers.")
    return urls
