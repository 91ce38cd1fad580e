"""Settings of the Ray Serve application, which are the `args` of its configuration file."""

from __future__ import annotations

import re
import shlex
from typing import Any

import msgspec

from stoker.base.config import check_range
from stoker.base.errors import ConfigError
from stoker.base.nodes import MAX_NODES
from stoker.deploy.model_name import model_name_of

NAME = "stoker"  # of the application
IMPORT_PATH = "stoker.ray:application"
MAX_REPLICAS = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,127}")
# Options of `stoker serve` that the application sets itself, or that belong to one process.
RESERVED = {
    "model": "model", "model-name": "name", "nnodes": "nodes", "node-rank": "nodes", "rendezvous": "nodes", "cluster-token-file": "nodes",
    "host": "the HTTP options of Ray Serve", "port": "the HTTP options of Ray Serve", "grpc-port": "the gRPC options of Ray Serve",
    "metrics-port": "/metrics of the replicas", "kv-events": "kv_events", "kv-events-replay": "kv_events", "stop-at-eof": "nothing",
    "dry-run": "stoker serve --ray --dry-run", "restarts": "Ray Serve, which restarts replicas", "config": "serve", "state-dir": "nothing",
    "tls-certificate": "the HTTP options of Ray Serve", "tls-key": "the HTTP options of Ray Serve", "log-file": "Ray's log files",
    "transfer": "stoker route for servers of two roles", "role": "stoker route for servers of two roles",
    "api-key": "STOKER_API_KEY", "admin-key-file": "STOKER_ADMIN_KEY", "rendezvous-timeout-s": "start_timeout_s",
}  # fmt: skip

SECRETS = {"STOKER_API_KEY", "STOKER_ADMIN_KEY", "STOKER_CLUSTER_TOKEN"}  # variables that are no settings


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, which is a deployment of Ray Serve."""

    model: str
    """What `stoker serve` accepts. All nodes of the cluster must be able to read it."""

    name: str = ""
    """The model name that clients use. Empty: the name that `stoker serve` gives `model`, such as the last part of its path."""

    min_replicas: int = 1
    """0: the last replica ends when there are no requests, and a request starts one."""

    max_replicas: int = 1
    initial_replicas: int | None = None
    """Replicas at the start. None: min_replicas."""

    target_requests: int = 32
    """Running and waiting sequences per replica, above which replicas are added."""

    target_kv_usage: float = 0.8
    """Used fraction of a replica's KV cache, above which replicas are added."""

    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 120.0
    nodes: int = 1
    """Hosts of one replica."""

    gpus: int | None = None
    """GPUs on each host of a replica. None: one for each rank of an engine for CUDA."""

    cpus: float | None = None
    """CPUs on each host of a replica. None: 1 for each rank."""

    resources: dict[str, float] = {}
    """Further resources of Ray on each host of a replica."""

    accelerator_type: str | None = None
    """Type of the GPUs, such as H100."""

    start_timeout_s: float = 1800.0
    """Limit for fetching, building and loading the engine."""

    drain_timeout_s: float = 60.0
    """Limit for requests in flight when a replica is stopped."""

    max_surge_percent: int = 0
    """Replicas, in percent, that a rolling update starts before it stops others. 0: it needs no further GPUs."""

    revision: str = ""
    """Any text. A change restarts the replicas one after the other, such as after the engine was built again at the same path."""

    serve: dict[str, Any] = {}
    """Further options of `stoker serve`, in the form of its --config file."""

    env: dict[str, str] = {}
    """Environment variables of the replicas, without secrets."""

    kv_events: bool = True
    """Publish block events, from which the ingress learns the prefixes that replicas hold."""

    listen: str | None = None
    """Address on which the replicas listen. None: that of their node in Ray."""

    command: str = ""
    """The Stoker program on the nodes. Empty: the Python interpreter of Ray with -m stoker."""

    def __post_init__(self) -> None:
        if not self.model or not self.model.isprintable():
            raise ConfigError(f"model={self.model!r} is refused.", cure="Name an engine, a checkpoint, a hub id or an address.")
        if not self.name:
            msgspec.structs.force_setattr(self, "name", re.sub(r"[^A-Za-z0-9_.-]", "-", model_name_of(self.model)))
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name={self.name!r} is refused.", cure="Use letters, digits and the characters _ . : @ / -.")
        check_range("min_replicas", self.min_replicas, 0, MAX_REPLICAS)
        check_range("max_replicas", self.max_replicas, max(1, self.min_replicas), MAX_REPLICAS)
        if self.initial_replicas is not None:
            check_range("initial_replicas", self.initial_replicas, self.min_replicas, self.max_replicas)
        check_range("target_requests", self.target_requests, 1, 1 << 20)
        check_range("nodes", self.nodes, 1, MAX_NODES)
        check_range("max_surge_percent", self.max_surge_percent, 0, 100)
        if self.gpus is not None:
            check_range("gpus", self.gpus, 0, 64)
        for name, lowest, highest in (
            ("target_kv_usage", 0.01, 1.0), ("upscale_delay_s", 0.0, 86400.0), ("downscale_delay_s", 0.0, 86400.0),
            ("start_timeout_s", 1.0, 86400.0), ("drain_timeout_s", 0.0, 86400.0), ("cpus", 0.0, 4096.0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ConfigError(f"{name}={value} is refused.", cure=f"Use a number from {lowest:g} to {highest:g}.")
        for key in self.serve:
            if (instead := RESERVED.get(key.replace("_", "-"))) is not None:
                raise ConfigError(f"serve: the option {key} is refused with Ray.", cure=f"Use {instead} instead.")
        for name in sorted(SECRETS & self.env.keys()):
            raise ConfigError(
                f"env: {name} is refused, because Ray shows these settings.",
                cure="Set it in the environment of `stoker serve --ray` or of Ray.",
            )
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command={self.command!r} is refused: {error}.", cure="Close the quotation.") from None


class IngressSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deployment that receives requests, and sends each to a replica."""

    replicas: int = 1
    cpus: float = 1.0
    host: str = "0.0.0.0"
    """The HTTP address of Ray Serve. On a loopback address, the routes under /router need no key."""

    tokenizer: str | None = None
    """Folder of the tokenizer of a single engine, for prefixes of tokens. None: the folder of the engine, or prefixes of text."""

    unavailable_timeout_s: float = 300.0
    """Limit for requests that wait for a replica to start."""

    max_retries: int = 5
    """Further replicas to which a request is sent if one fails before it has answered."""

    policy: str = "prefix"
    max_request_bytes: int = 16 << 20
    access_log: bool = True

    def __post_init__(self) -> None:
        check_range("replicas", self.replicas, 1, 256)
        check_range("max_request_bytes", self.max_request_bytes, 1 << 10, 1 << 32)
        if not 0 <= self.cpus <= 256:
            raise ConfigError(f"cpus={self.cpus} is refused.", cure="Use a number from 0 to 256.")
        if not 0.001 <= self.unavailable_timeout_s <= 86400:
            raise ConfigError(f"unavailable_timeout_s={self.unavailable_timeout_s} is refused.", cure="Use seconds, from 0.001 to 86400.")
        from stoker.router.core.settings import RoutingSettings

        RoutingSettings(policy=self.policy, max_retries=self.max_retries)


class ApplicationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines, and the ingress in front of them."""

    engines: tuple[EngineSettings, ...]
    ingress: IngressSettings = IngressSettings()

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("engines is empty.", cure="Name one engine or more.")
        names = [engine.name for engine in self.engines]
        if duplicate := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise ConfigError(f"two engines have the name {duplicate!r}.", cure="Set name to a different value for each of them.")
        if self.ingress.tokenizer is not None and len(names) > 1:
            raise ConfigError(
                "ingress.tokenizer is refused with several engines.", cure="Leave it out: the folders of the engines are used."
            )


def read_settings(args: dict[str, Any]) -> ApplicationSettings:
    """The settings in the `args` of a configuration file. Raises ConfigError with the name of the setting."""
    try:
        return msgspec.convert(args, ApplicationSettings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"args of {IMPORT_PATH}: {str(error).rstrip('.')}.", cure="docs/ray.md lists the settings.") from None
