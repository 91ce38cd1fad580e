"""The arguments of `stoker serve`. This module imports little, so that the command shows progress before it imports the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker.base.config import RuntimeConfig
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

    def read_deployment(self, progress: Progress | None = None) -> Deployment:
        """The deployment of the model with the settings of the command line."""
        from stoker.cli.prepare_server import read_deployment

        return read_deployment(self.model, self.settings, self.runtime, frozenset(self.origins), progress, self.build)
