"""The table of tool-call parsers. `--tool-parser` uses these names."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocols.common.parsers.tools.hermes import HermesParser
from stoker.server.protocols.common.parsers.tools.llama3 import Llama3Parser
from stoker.server.protocols.common.parsers.tools.mistral import MistralParser
from stoker.server.protocols.common.parsers.tools.parser import ToolParser

TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser")
TOOL_PARSERS.add("llama3", Llama3Parser)
TOOL_PARSERS.add("hermes", HermesParser)
TOOL_PARSERS.add("qwen", HermesParser)
TOOL_PARSERS.add("mistral", MistralParser)
