"""`stoker export ray`: a Ray Serve application with one or several engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.cli.options import struct_options
from stoker.ray.export import KubeSettings, export_ray
from stoker.ray.settings import ApplicationSettings, EngineSettings

ENGINE_HELP = {
    "min_replicas": "Minimum number of replicas of each engine; 0 lets the last one end without requests.",
    "max_replicas": "Maximum number of replicas of each engine.",
    "nodes": "Hosts of one replica.",
    "gpus": "GPUs on each host of a replica. Default: one per rank of an engine for CUDA.",
    "cpus": "CPUs on each host of a replica. Default: 1 for each rank.",
    "accelerator_type": "Type of the GPUs, such as H100.",
    "target_requests": "Running and waiting sequences per replica, above which replicas are added.",
    "target_kv_usage": "Used fraction of the KV cache, above which replicas are added.",
}
KUBE_HELP = {
    "image": "An image with stoker[ray,grpc]: also write the KubeRay manifest rayservice.yaml.",
    "claim": "A PersistentVolumeClaim with the engines.",
    "mount_path": "Where the claim is mounted.",
    "memory": "Memory of each worker.",
    "name": "Name of the RayService.",
}


class _Engine(EngineSettings, frozen=True, kw_only=True):
    """The settings that all engines of the command have."""

    model: str = "engine"


@struct_options(_Engine, "common", ENGINE_HELP)
@struct_options(KubeSettings, "kube", KUBE_HELP)
def ray(
    models: Annotated[list[str], typer.Argument(help="Engines or what else stoker serve accepts; the last argument is the folder.")],
    *,
    common: _Engine,
    kube: KubeSettings,
) -> None:
    """Write serve.yaml, which `serve deploy` and `stoker serve --ray --ray-config` run, and with --image a manifest for KubeRay.

    The arguments are the models, and at last the folder to write. The file can be edited: docs/ray.md lists its settings.

    Examples:

      stoker export ray engine app

      stoker export ray /models/llama70 /models/qwen app --min-replicas 0 --max-replicas 4 --image registry/stoker:ray --claim models
    """
    if len(models) < 2:
        raise typer.BadParameter("name at least one model, and then the folder")
    names = list(ENGINE_HELP)
    values: dict[str, Any] = {name: getattr(common, name) for name in names}
    engines = tuple(EngineSettings(model=_absolute(model), **values) for model in models[:-1])
    for file in export_ray(ApplicationSettings(engines=engines), Path(models[-1]), kube):
        typer.echo(file)


def _absolute(model: str) -> str:
    """The absolute path of a local model."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
