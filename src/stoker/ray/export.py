"""Writes the configuration file of Ray Serve, and a RayService manifest for KubeRay."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import yaml

from stoker.base.config import check_range
from stoker.base.errors import ConfigError
from stoker.ray.grpc_service import SERVICER
from stoker.ray.placement import place_replica
from stoker.ray.settings import IMPORT_PATH, NAME, ApplicationSettings

DEFAULT_GRPC_PORT = 9000  # that KubeRay's service of Ray Serve forwards
# What the Kubernetes API or the KubeRay operator would refuse only when the manifest is applied. Field: (pattern, what it accepts).
_KUBE_PATTERNS = {
    "name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "at most 40 lower-case letters, digits and -, from a letter to a letter or digit"),
    "image": (r"[A-Za-z0-9][\w.:/@-]*", "a reference such as registry/stoker:ray"),
    "claim": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "the name of a claim: lower-case letters, digits, - and ."),
    "memory": (r"[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)?", "a quantity such as 64Gi"),
}


class KubeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the manifest."""

    name: str = "stoker"
    image: str = ""
    """An image with stoker[ray,grpc]. Empty: no manifest is written."""

    claim: str | None = None
    """A PersistentVolumeClaim with the engines, mounted at `mount_path` on all nodes."""

    mount_path: str = "/models"
    workers: int | None = None
    """Nodes without the head. None: those of the replicas at the start."""

    max_workers: int | None = None
    """None: those of max_replicas."""

    memory: str = "64Gi"
    """Of each worker."""

    ray_version: str = "2.60.0"

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        unused = [name for name, default in defaults.items() if getattr(self, name) != default]
        if unused and not self.image:
            raise ConfigError(f"{unused[0]} has no effect without image: no manifest is written.", cure="Set image, or leave it out.")
        for name, (pattern, accepted) in _KUBE_PATTERNS.items():
            value = getattr(self, name)
            if value != defaults[name] and re.fullmatch(pattern, value, re.ASCII) is None:
                raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use {accepted}.")
        if not PurePosixPath(self.mount_path).is_absolute():
            raise ConfigError(f"mount_path={self.mount_path!r} is refused.", cure="Use an absolute path in the container.")
        for field in ("workers", "max_workers"):
            if getattr(self, field) is not None:
                check_range(field, getattr(self, field), 0, 4096)


def serve_config(settings: ApplicationSettings, *, host: str = "0.0.0.0", http_port: int = 8000, grpc_port: int = DEFAULT_GRPC_PORT) -> str:
    """The text of a configuration file for `serve deploy`, and for `stoker serve --ray-config`."""
    return yaml.safe_dump(_serve_config(settings, host, http_port, grpc_port), sort_keys=False)


def export_ray(settings: ApplicationSettings, folder: Path, kube: KubeSettings = KubeSettings()) -> list[Path]:
    """Write serve.yaml, and with an image also rayservice.yaml. Returns the files. Raises ConfigError if one exists."""
    for engine in settings.engines:
        place_replica(engine)
    texts = {"serve.yaml": serve_config(settings)}
    if kube.image:
        texts["rayservice.yaml"] = yaml.safe_dump(_ray_service(settings, kube), sort_keys=False)
    files = [folder / name for name in texts]
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists.", cure="Remove it, or name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def arguments_of(settings: ApplicationSettings) -> dict[str, Any]:
    """The `args` of the configuration file: the settings that differ from their defaults."""
    return {
        "engines": [{"model": engine.model, "name": engine.name, **_changed(engine, ("model", "name"))} for engine in settings.engines],
        "ingress": _changed(settings.ingress, ()),
    }


def _serve_config(settings: ApplicationSettings, host: str, http_port: int, grpc_port: int) -> dict[str, Any]:
    """The configuration as a dictionary."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": http_port},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": [SERVICER]},
        "applications": [{"name": NAME, "route_prefix": "/", "import_path": IMPORT_PATH, "args": arguments_of(settings)}],
    }


def _ray_service(settings: ApplicationSettings, kube: KubeSettings) -> dict[str, Any]:
    """The RayService resource."""
    groups = [_worker_group(settings, index, kube) for index in range(len(settings.engines))]
    head = _pod(kube, {"cpu": "2", "memory": "8Gi"}, ports={"gcs": 6379, "dashboard": 8265, "serve": 8000, "grpc": DEFAULT_GRPC_PORT})
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": kube.name},
        "spec": {
            "serveConfigV2": serve_config(settings),
            "rayClusterConfig": {
                "rayVersion": kube.ray_version,
                "enableInTreeAutoscaling": True,
                "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": {"spec": head}},
                "workerGroupSpecs": groups,
            },
        },
    }


def _worker_group(settings: ApplicationSettings, index: int, kube: KubeSettings) -> dict[str, Any]:
    """The nodes of one engine, each of which has the resources of one host of a replica."""
    engine = settings.engines[index]
    bundle = place_replica(engine).bundles[0]
    least = engine.min_replicas if engine.initial_replicas is None else engine.initial_replicas
    smallest = engine.min_replicas * engine.nodes
    most = kube.max_workers if kube.max_workers is not None else engine.max_replicas * engine.nodes
    workers = kube.workers if kube.workers is not None else least * engine.nodes
    if most < smallest:
        raise ConfigError(
            f"max_workers={most} is less than the {smallest} hosts of min_replicas of the engine {engine.name}.", cure="Raise it."
        )
    if not smallest <= workers <= most:
        raise ConfigError(f"workers={workers} is refused for the engine {engine.name}.", cure=f"Use {smallest} to {most}.")
    limits = {"cpu": str(max(1, round(bundle["CPU"] + 1))), "memory": kube.memory}
    if gpus := int(bundle.get("GPU", 0)):
        limits["nvidia.com/gpu"] = str(gpus)
    parameters = {"resources": "'" + json.dumps(engine.resources) + "'"} if engine.resources else {}
    return {
        "groupName": f"engine-{index}",
        "replicas": workers,
        "minReplicas": smallest,
        "maxReplicas": most,
        "rayStartParams": parameters,
        "template": {"spec": _pod(kube, limits, ports={})},
    }


def _pod(kube: KubeSettings, limits: dict[str, str], ports: dict[str, int]) -> dict[str, Any]:
    """The specification of a pod."""
    container: dict[str, Any] = {"name": "ray", "image": kube.image, "resources": {"limits": limits, "requests": limits}}
    container["env"] = [{"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"}]
    if ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    spec: dict[str, Any] = {"containers": [container]}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if kube.claim is not None:
        mounts.append({"name": "models", "mountPath": kube.mount_path})
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": kube.claim}})
    container["volumeMounts"] = mounts
    return spec | {"volumes": volumes}


def _changed(value: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a struct that differ from their defaults."""
    fields = msgspec.structs.fields(type(value))
    return {
        field.name: getattr(value, field.name)
        for field in fields
        if field.name not in without and getattr(value, field.name) != _default(field)
    }


def _default(field: Any) -> Any:
    """The default of a field."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
