"""Checks the names in the settings of a server, before anything is loaded."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.selection import check_parser
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.settings import ServerSettings


def check_names(settings: ServerSettings) -> None:
    """Raise ConfigError, with similar names, for a protocol, tool parser or reasoning parser that does not exist."""
    if settings.protocols:
        from stoker.server.protocols.registry import PROTOCOLS  # all protocols, which take longer to import than the rest of the command

        for name in settings.protocols:
            PROTOCOLS.get(name)
    check_parser(TOOL_PARSERS, settings.tool_parser)
    check_parser(REASONING_PARSERS, settings.reasoning_parser)
