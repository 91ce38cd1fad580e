"""The resources of one replica: the CPUs and GPUs on each of its hosts, as bundles of a placement group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.base.nodes import ranks_per_node
from stoker.deploy.cached_engines import find_cached_engine
from stoker.deploy.engine import is_engine, read_config
from stoker.ray.settings import EngineSettings


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Bundle 0 contains the replica's actor, which starts the ranks of its host. Each further host has an actor in its own bundle."""

    bundles: tuple[dict[str, float], ...]
    strategy: str

    @property
    def actor_options(self) -> dict[str, Any]:
        """Options of the actor in bundle 0, which has all resources of the bundle."""
        return actor_options(self.bundles[0])


def actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """Options of an actor that has all resources of a bundle."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    return options | ({"resources": others} if others else {})


def place_replica(settings: EngineSettings) -> Placement:
    """The bundles of a replica.

    Raises ConfigError if its model is a path or the name of an engine that does not exist, and if the ranks of a local engine cannot be
    divided among its hosts.
    """
    path = _local_path(settings)
    num_ranks, gpus = 1, settings.gpus
    if path.is_dir() and is_engine(path):
        from stoker.engine.reader import Engine

        config = Engine.open(path).config
        num_ranks = ranks_per_node(config.mapping, settings.nodes)
        needed = num_ranks if config.target.device == "cuda" else 0
        if gpus is not None and gpus < needed:
            raise ConfigError(
                f"engine {settings.name}: gpus={gpus} is refused: its {needed} ranks on each host need one GPU each.",
                cure=f"Use {needed}, or leave it out.",
            )
        gpus = needed if gpus is None else gpus
    elif gpus is None:
        mapping = _mapping_of(settings)
        num_ranks = ranks_per_node(mapping, settings.nodes)
        gpus = 0 if settings.serve.get("device") == "cpu" else num_ranks
    bundle: dict[str, float] = {"CPU": settings.cpus if settings.cpus is not None else num_ranks}
    if gpus:
        bundle["GPU"] = gpus
    if settings.accelerator_type is not None:
        bundle[f"accelerator_type:{settings.accelerator_type}"] = 0.001
    bundle |= settings.resources
    return Placement(bundles=(bundle,) * settings.nodes, strategy="STRICT_SPREAD" if settings.nodes > 1 else "STRICT_PACK")


def _local_path(settings: EngineSettings) -> Path:
    """The path of the model, or of the engine in the cache with this name. It does not exist for hub ids and addresses.

    Raises ConfigError for what `stoker serve` would refuse on the nodes of the cluster.
    """
    model = settings.model
    path = Path(model).expanduser()
    if path.exists() or "://" in model:
        return path
    if model[0] in "./~" or model.count("/") > 1:
        raise ConfigError(f"engine {settings.name}: model={model} does not exist.", cure="Correct the path.")
    if "/" in model or settings.command:  # a hub id, or a name that the program of the setting `command` may know, such as in a container
        return path
    if (engine := find_cached_engine(model)) is None:
        raise ConfigError(
            f"engine {settings.name}: model={model} does not exist.", cure="Name a path, ORG/NAME or an engine of stoker list."
        )
    return engine


def _mapping_of(settings: EngineSettings) -> Mapping:
    """The ranks of the engine that is built from a checkpoint."""
    values = {key.replace("-", "_"): value for key, value in settings.serve.items()}

    def size(name: str) -> int:
        """The value of an option."""
        value = values.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"serve: {name}={value!r} is refused.", cure="Use a whole number above 0.")
        return value

    return Mapping(tensor_parallel=size("tensor_parallel"), pipeline_parallel=size("pipeline_parallel"))


def is_local_tokenizer(model: str) -> bool:
    """Whether `model` is an engine folder on this machine with a tokenizer, with which an ingress can tokenize."""
    path = Path(model).expanduser()
    return (path / "tokenizer.json").is_file() and "format_version" in read_config(path)
