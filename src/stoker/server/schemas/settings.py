"""What a person sets of the doors of a server: addresses, names and the defaults of requests."""

from __future__ import annotations

import msgspec

from stoker.base.config import check_range


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that every protocol shares; `options` holds those of one protocol. A port of None stays closed."""

    host: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int | None = None
    metrics_port: int | None = None  # None: metrics are served on http_port
    model_name: str | None = None  # the name clients use; None: the folder's
    protocols: tuple[str, ...] = ()  # rows of server/protocols to open; empty: all that fit
    add_special_tokens: bool = True  # when a prompt is text
    skip_special_tokens: bool = True  # special tokens make no text
    default_max_tokens: int | None = None  # for requests that name none; None: the protocol's own
    request_timeout_s: float | None = None  # deadline of requests that name none
    load_timeout_s: float | None = None  # loading may take so long
    options: msgspec.Struct | None = None  # TritonOptions, and their like of other protocols

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port", "metrics_port"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, 65535)
