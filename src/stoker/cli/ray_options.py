"""The options of `stoker serve` that run the server on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import typer

from stoker.base.errors import ConfigError, DependencyError
from stoker.cli.options import struct_options
from stoker.ray.settings import ApplicationSettings, EngineSettings, IngressSettings, read_settings
from stoker.server.settings import ServerSettings


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the options request. None: the default of the setting with the same name."""

    ray: bool = False
    ray_address: str | None = None
    ray_config: str | None = None
    ray_min_replicas: int | None = None
    ray_max_replicas: int | None = None
    ray_target_requests: int | None = None
    ray_target_kv_usage: float | None = None
    ray_upscale_delay_s: float | None = None
    ray_downscale_delay_s: float | None = None
    ray_nodes: int | None = None
    ray_gpus: int | None = None
    ray_cpus: float | None = None
    ray_ingresses: int | None = None


# Field of RayOptions: help text of its option.
RAY_HELP = {
    "ray": "Serve on a Ray cluster: replicas of the engine, behind an ingress that routes by prefix. Needs stoker[ray].",
    "ray_address": "Address of the Ray cluster; auto for one on this machine. Default: RAY_ADDRESS, or a new cluster on this machine.",
    "ray_config": "A configuration file of Ray Serve from stoker export ray, which may name several engines.",
    "ray_min_replicas": "Minimum number of replicas; 0 lets the last one end without requests.",
    "ray_max_replicas": "Maximum number of replicas.",
    "ray_target_requests": "Running and waiting sequences per replica, above which replicas are added.",
    "ray_target_kv_usage": "Used fraction of the KV cache, above which replicas are added.",
    "ray_upscale_delay_s": "Seconds of higher load before replicas are added.",
    "ray_downscale_delay_s": "Seconds of lower load before replicas are removed.",
    "ray_nodes": "Hosts of one replica, over which the ranks of its engine are distributed.",
    "ray_gpus": "GPUs on each host of a replica. Default: one per rank of an engine for CUDA.",
    "ray_cpus": "CPUs on each host of a replica. Default: 1 for each rank.",
    "ray_ingresses": "Number of processes that receive and route requests.",
}
ray_options = struct_options(RayOptions, "ray_options", RAY_HELP)

_OF_ENGINE = (
    "min_replicas", "max_replicas", "target_requests", "target_kv_usage", "upscale_delay_s", "downscale_delay_s", "nodes", "gpus", "cpus",
)  # fmt: skip
_OF_PROXIES = ("host", "http_port", "grpc_port", "drain_timeout_s", "model_name", "max_request_bytes")  # not passed on to replicas
_IGNORED = ("model", "config", "dry_run", "log_level", "log_format", *RAY_HELP)


def check_ray_options(options: RayOptions) -> None:
    """Raise ConfigError for an option that needs --ray, DependencyError if Ray is not installed."""
    for name, value in msgspec.structs.asdict(options).items():
        if name != "ray" and value is not None and not options.ray:
            raise ConfigError(f"{name}={value} requires --ray.", cure="Add --ray, or leave it out.")
    if options.ray:
        from importlib.util import find_spec

        if find_spec("ray") is None or find_spec("aiohttp") is None:
            raise DependencyError("ray", "stoker serve --ray", "ray")


def ray_application(context: typer.Context, options: RayOptions, settings: ServerSettings, explicit: dict[str, str]) -> ApplicationSettings:
    """The settings of the application. Raises ConfigError."""
    model = context.params["model"]
    if options.ray_config is not None:
        others = [name for name in explicit if name not in (*_IGNORED, "host", "http_port", "grpc_port") or name == "model"]
        others += [f"ray_{name}" for name in (*_OF_ENGINE, "ingresses") if getattr(options, f"ray_{name}") is not None]
        if others:
            raise ConfigError(f"{others[0]} is refused together with ray_config.", cure="Set it in the file.")
        return read_application(Path(options.ray_config))
    if model is None:
        raise ConfigError("no model is given.", cure="Name an engine or a checkpoint, or a file with --ray-config.")
    path = Path(model).expanduser()
    values: dict[str, Any] = {name: getattr(options, f"ray_{name}") for name in _OF_ENGINE}
    if values["min_replicas"] is not None and values["max_replicas"] is None:
        values["max_replicas"] = max(1, values["min_replicas"])
    if values["max_replicas"] is not None and values["min_replicas"] is None:
        values["min_replicas"] = 1
    engine = EngineSettings(
        model=str(path.resolve()) if path.exists() else model, name=settings.model_name or "",
        drain_timeout_s=settings.drain_timeout_s, serve=_serve_options(context, explicit),
        **{name: value for name, value in values.items() if value is not None},
    )  # fmt: skip
    ingress = IngressSettings(
        host=settings.host, replicas=options.ray_ingresses or 1, max_request_bytes=settings.max_request_bytes,
        access_log=settings.log_requests != "none",
    )  # fmt: skip
    return ApplicationSettings(engines=(engine,), ingress=ingress)


def read_application(file: Path) -> ApplicationSettings:
    """The settings in a configuration file of Ray Serve. Raises ConfigError."""
    import yaml

    from stoker.ray.settings import IMPORT_PATH

    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
        found = [each for each in value["applications"] if each["import_path"] == IMPORT_PATH]
    except OSError as error:
        raise ConfigError(f"ray_config={file} cannot be read: {error.strerror}.", cure="Correct the path.") from None
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError):
        raise ConfigError(f"ray_config={file} is not a configuration of Ray Serve.", cure="Write one with: stoker export ray.") from None
    if len(found) != 1:
        raise ConfigError(f"ray_config={file} has {len(found)} applications {IMPORT_PATH}.", cure="Keep one.")
    return read_settings(found[0].get("args") or {})


def _serve_options(context: typer.Context, explicit: dict[str, str]) -> dict[str, Any]:
    """The options that were set, in the form of a --config file, without those of the application and of Ray Serve."""
    found: dict[str, Any] = {}
    for parameter in context.command.params:
        name = parameter.name
        if name is None or name not in explicit or name in (*_IGNORED, *_OF_PROXIES):
            continue
        option = next(option for option in parameter.opts if option.startswith("--"))
        value = context.params[name]
        found[option.removeprefix("--")] = [str(each) for each in value] if isinstance(value, (list, tuple)) else _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A value that YAML has a notation for. Files get absolute paths, which must exist on all nodes."""
    return str(value.resolve()) if isinstance(value, Path) else value


def run_on_ray(application: ApplicationSettings, options: RayOptions, settings: ServerSettings, announce: Callable[[str], None]) -> int:
    """Serve until a stop signal. Returns the exit status. Raises ConfigError before anything is started."""
    if settings.tls_key is not None:
        raise ConfigError(
            "tls_key is refused with Ray.", cure="Set ssl_keyfile and ssl_certfile in http_options of the Ray Serve configuration."
        )
    from stoker.ray.serve import RayAddress, serve

    where = RayAddress(address=options.ray_address, host=settings.host, http_port=settings.http_port, grpc_port=settings.grpc_port)
    return serve(application, where, announce)
