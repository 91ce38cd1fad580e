"""The arguments of `stoker serve`. This module imports little, so that the command shows progress before it imports the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stoker.base import env
from stoker.base.config import Mapping, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings
from stoker.deploy.build_settings import BuildSettings
from stoker.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.deploy.deployment import Deployment
    from stoker.deploy.prepare import Progress


class ServeArguments(NamedTuple):
    """What the command line requests. `origins`: where each parameter that is not at its default was set."""

    model: str | None
    settings: ServerSettings
    runtime: RuntimeConfig
    build: BuildSettings
    origins: dict[str, str]
    nodes: NodeSettings = NodeSettings()

    def read_deployment(self, progress: Progress | None = None) -> Deployment:
        """The deployment of the model with the settings of the command line."""
        from stoker.cli.node_options import check_required_nodes
        from stoker.cli.prepare_server import read_deployment

        deployment = read_deployment(self.model, self.settings, self.runtime, frozenset(self.origins), progress, self.build)
        check_required_nodes(deployment.nodes, self.nodes)
        if self.nodes.num_nodes > 1 and deployment.server.restarts:
            raise ConfigError(
                f"restarts={deployment.server.restarts} is refused with nnodes={self.nodes.num_nodes}: they end with the engine.",
                cure="Leave it out, and let the scheduler start all nodes again.",
            )
        return with_default_mapping(deployment, self.nodes)


def with_default_mapping(deployment: Deployment, nodes: NodeSettings) -> Deployment:
    """The deployment of a checkpoint, for which no number of ranks is set, with one stage per host and the host's GPUs in each stage."""
    from stoker.deploy.deployment import BuildOptions
    from stoker.deploy.devices import visible_gpus

    source = deployment.source
    if nodes.num_nodes == 1 or not isinstance(source, BuildOptions) or source.mapping.world_size > 1:
        return deployment
    per_host = nodes.num_nodes // nodes.num_hosts
    gpus = 0 if deployment.runtime.device == "cpu" else visible_gpus(env.child_environment())
    mapping = Mapping(tensor_parallel=per_host if per_host > 1 else max(gpus, 1), pipeline_parallel=nodes.num_hosts)
    return msgspec.structs.replace(deployment, source=msgspec.structs.replace(source, mapping=mapping))
