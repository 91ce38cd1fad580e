"""Selects the parsers of a model: by name, or with the name `auto` by its chat template."""

from __future__ import annotations

from functools import cache

import msgspec

from stoker.base.registry import Registry
from stoker.frontend.service import Service
from stoker.server.protocols.common.parsers.reasoning import REASONING_PARSERS
from stoker.server.protocols.common.parsers.reasoning.parser import ReasoningParser
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.protocols.common.parsers.tools.parser import ToolParser
from stoker.server.settings import ServerSettings

AUTO = "auto"


_Registry = Registry[type[ToolParser]] | Registry[type[ReasoningParser]]


def check_parser(registry: _Registry, name: str | None) -> None:
    """Raise ConfigError, with similar names, if there is no such parser."""
    if name is not None and name != AUTO:
        registry.get(name)


def with_parsers(settings: ServerSettings, service: Service) -> ServerSettings:
    """The settings with names of parsers, or None, instead of `auto`."""
    if AUTO not in (settings.tool_parser, settings.reasoning_parser):
        return settings
    tools, reasoning = parsers_of_template(service.chat_template or "")
    return msgspec.structs.replace(
        settings,
        tool_parser=tools if settings.tool_parser == AUTO else settings.tool_parser,
        reasoning_parser=reasoning if settings.reasoning_parser == AUTO else settings.reasoning_parser,
    )


@cache
def parsers_of_template(template: str) -> tuple[str | None, str | None]:
    """The names of the tool parser and of the reasoning parser for a chat template; None if it is of no known family."""
    return _match(TOOL_PARSERS, template), _match(REASONING_PARSERS, template)


def _match(registry: _Registry, template: str) -> str | None:
    """The row with the longest marks, of those whose marks all occur in the template. Of several such rows, the first."""
    best, length = None, 0
    for name in registry:
        marks = registry.get(name).template_marks
        if all(mark in template for mark in marks) and len("".join(marks)) > length:
            best, length = name, len("".join(marks))
    return best
