"""The keys of an application, which the process that builds it passes to the actors.

They are arguments of the actors' constructors. Ray logs the environment variables of actors (`runtime_env`), and its dashboard shows them.
"""

from __future__ import annotations

import msgspec

from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.ray.settings import ApplicationSettings


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the variables STOKER_API_KEY and STOKER_ADMIN_KEY. None: that of the environment of the node, if it is set there."""

    api_key: str | None = None
    admin_key: str | None = None

    def __repr__(self) -> str:
        """The names only, because arguments can be printed in messages."""
        return "Keys(not shown)"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the keys that are set."""
        values = {"STOKER_API_KEY": self.api_key, "STOKER_ADMIN_KEY": self.admin_key}
        return {name: value for name, value in values.items() if value is not None}


def read_keys(settings: ApplicationSettings) -> Keys:
    """The keys of this process. Raises ConfigError for an engine with a file of API keys, if there is no key for the ingress."""
    keys = Keys(api_key=env.api_key(), admin_key=env.admin_key())
    for engine in settings.engines:
        for option, value in engine.serve.items():
            if option.replace("_", "-") == "api-keys" and keys.api_key is None:
                raise ConfigError(
                    f"engine {engine.name}: serve: {option}={value} is refused without STOKER_API_KEY: health checks need a key.",
                    cure="Set STOKER_API_KEY where the application is built. Replicas accept it besides the keys of the file.",
                )
    return keys
