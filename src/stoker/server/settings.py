"""Settings of the server: addresses, names, limits and defaults of requests."""

from __future__ import annotations

import re

import msgspec

from stoker.base.config import RequestLimits, check_choice, check_range
from stoker.base.errors import ConfigError

MIN_KEY_CHARS = 8
MAX_TIMEOUT_S = 1 << 24
MAX_FRONTENDS = 256
MAX_RESTARTS = 1 << 20
METRIC_NAMES = ("stoker", "triton", "vllm")
LOG_REQUESTS = ("none", "line", "contents")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/]+")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all protocols share. `options` holds the settings of one protocol. A port of None is not opened."""

    host: str = "127.0.0.1"  # 0.0.0.0 to be reachable from other machines
    http_port: int = 8000  # 0: any free port
    grpc_port: int | None = None
    metrics_port: int | None = None  # a further port for metrics and health; None: only on http_port
    model_name: str | None = None  # the name that clients use; None: the name of the engine's directory
    protocols: tuple[str, ...] = ()  # names of server/protocols/registry.py; empty: all
    console: bool | None = None  # serve the web console; None: unless `protocols` names some
    add_special_tokens: bool = True  # for prompts given as text
    skip_special_tokens: bool = True  # special tokens produce no text
    request_limits: RequestLimits = RequestLimits()  # limits of requests below those of the engine
    default_max_tokens: int | None = None  # for requests that give none; None: the protocol's own default
    request_timeout_s: float | None = None  # deadline of requests that give none
    load_timeout_s: float | None = None  # limit for loading the engine
    num_frontends: int = 1  # processes that parse, tokenize and stream
    max_request_bytes: int = 16 << 20  # of a request's body; a longer one is refused with status 413 before it is read
    drain_timeout_s: float = 30.0  # limit for requests in flight when the server stops
    api_keys: tuple[str, ...] = ()  # accepted as Authorization: Bearer KEY; empty: no authentication. Never printed
    api_keys_file: str | None = None  # further keys, read again on SIGHUP (server/tenants/key_file.py)
    admin_key: str | None = None  # for the routes of /debug; None: they are closed. Never printed
    usage_log: str | None = None  # file to which the usage of each request with a named key is appended
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call; "*" for all
    tls_certificate: str | None = None  # path of a PEM file; together with tls_key it enables HTTPS
    tls_key: str | None = None
    # Formats of the model's tool calls and reasoning: names of TOOL_PARSERS and REASONING_PARSERS, or "auto", by the chat template.
    tool_parser: str | None = "auto"  # None, or a template of no known family: tools are refused
    reasoning_parser: str | None = None  # None: reasoning remains in the text
    metric_names: tuple[str, ...] = ("stoker", "triton")  # systems whose names metrics have: METRIC_NAMES
    otlp_endpoint: str | None = None  # URL of a collector of OpenTelemetry for OTLP over HTTP; None: no traces
    trace_sampling: float = 1.0  # fraction of the requests without a traceparent that are traced
    log_requests: str = "line"  # in the log: none, a line per request, or also its contents (prompt and answer)
    state_dir: str | None = None  # directory of stored responses, files and batches; None: a temporary one of this server
    max_stored_bytes: int = 1 << 30  # of stored responses, and of files; each
    shared_memory: tuple[str, ...] = ()  # regions that KServe clients may register: patterns of keys such as /input_*, or of cuda:0
    exit_on_error: bool = True  # False: the server stays without its model if the executor cannot start
    restarts: int = 0  # in a row, of an executor that failed after it was ready; and of the only frontend if above 0
    retry_unstarted: bool = False  # requests of a failed executor run again if nothing was sent to their clients
    test_models: bool = False  # serve the models of tritonclient's examples, too
    options: msgspec.Struct | None = None  # TritonOptions, LMIOptions or TrussOptions

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port", "metrics_port"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, 65535)
        self._check_ports_differ()
        check_range("num_frontends", self.num_frontends, 1, MAX_FRONTENDS)
        check_range("restarts", self.restarts, 0, MAX_RESTARTS)
        if self.retry_unstarted and not self.restarts:
            raise ConfigError("retry_unstarted=True is refused: a failed executor is not started again.", cure="Set --restarts, too.")
        if self.usage_log is not None and self.api_keys_file is None:
            raise ConfigError("usage_log is refused without a file of API keys.", cure="Set --api-keys to a .yaml file with named keys.")
        check_range("max_request_bytes", self.max_request_bytes, 1 << 10, 1 << 32)
        check_range("max_stored_bytes", self.max_stored_bytes, 1 << 20, 1 << 50)
        if not self.metric_names:
            raise ConfigError("metric_names is empty.", cure=f"Use one or more of: {', '.join(METRIC_NAMES)}.")
        for name in self.metric_names:
            check_choice("metric_names", name, METRIC_NAMES)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint={self.otlp_endpoint!r} is refused.", cure="Use a URL such as http://localhost:4318.")
        if not 0 <= self.trace_sampling <= 1:
            raise ConfigError(f"trace_sampling={self.trace_sampling} is refused.", cure="Use a fraction from 0 to 1.")
        if self.trace_sampling != 1 and self.otlp_endpoint is None:
            raise ConfigError(f"trace_sampling={self.trace_sampling} has no effect without otlp_endpoint.", cure="Set otlp_endpoint, too.")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origins={origin!r} is refused.", cure="Use * or an origin without a path: https://example.org.")
        if self.test_models and self.protocols and "kserve" not in self.protocols and self.grpc_port is None:
            raise ConfigError("test_models needs the protocol kserve, which is not served.", cure="Add --protocol kserve, or leave it out.")
        check_choice("log_requests", self.log_requests, LOG_REQUESTS)
        if self.default_max_tokens is not None:
            check_range("default_max_tokens", self.default_max_tokens, 1, 1 << 24)
        for name in ("request_timeout_s", "load_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_TIMEOUT_S:
                raise ConfigError(f"{name}={value} is refused.", cure=f"Use seconds, above 0 and at most {MAX_TIMEOUT_S}.")
        if not 0 <= self.drain_timeout_s <= 86400:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s} is refused.", cure="Use seconds, from 0 to 86400.")
        for key in (*self.api_keys, *([self.admin_key] if self.admin_key is not None else [])):
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                raise ConfigError("an API key is refused.", cure=f"Use at least {MIN_KEY_CHARS} printable ASCII characters.")
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_certificate" if self.tls_certificate is None else "tls_key"
            raise ConfigError(f"{missing} is not set.", cure="HTTPS needs both the certificate and its key.")

    def _check_ports_differ(self) -> None:
        """Raise ConfigError if two servers are on the same port. 0 is any free one."""
        ports: dict[int, str] = {}
        for name in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self, name)
            if port and port in ports:
                raise ConfigError(f"{name}={port} is refused: {ports[port]} is the same port.", cure="Change one of them.")
            if port:
                ports[port] = name
