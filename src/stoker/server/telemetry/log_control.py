"""Changes of the log's configuration while the server runs, in the supervisor and in all frontends."""

from __future__ import annotations

from stoker.base import logging
from stoker.base.logging import LogConfig
from stoker.server.coordination import Coordination, Values

LOG = "log"  # name of the LogConfig in the coordination, once it was changed


def follow_log(coordination: Coordination) -> None:
    """Apply the present configuration of the server, and each later one, in this process."""
    if (config := coordination.values.get(LOG)) is not None:
        logging.apply(config)
    coordination.on_change(_apply)


async def change_log(coordination: Coordination, config: LogConfig) -> None:
    """Use `config` in all processes that follow the log. Raises ConfigError if a file cannot be opened, and then changes nothing."""
    logging.apply(config)
    await coordination.set(LOG, config)


async def _apply(changes: Values) -> None:
    """Apply a changed configuration."""
    if (config := changes.get(LOG)) is not None:
        logging.apply(config)
