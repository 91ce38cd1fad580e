"""The table of tool-call parsers. `--tool-parser` uses these names."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocols.common.parsers.tools.deepseek_v3 import DeepSeekV3Parser
from stoker.server.protocols.common.parsers.tools.deepseek_v31 import DeepSeekV31Parser
from stoker.server.protocols.common.parsers.tools.glm45 import Glm45Parser
from stoker.server.protocols.common.parsers.tools.gpt_oss import GptOssParser
from stoker.server.protocols.common.parsers.tools.granite import GraniteParser
from stoker.server.protocols.common.parsers.tools.hermes import HermesParser
from stoker.server.protocols.common.parsers.tools.internlm import InternLMParser
from stoker.server.protocols.common.parsers.tools.jamba import JambaParser
from stoker.server.protocols.common.parsers.tools.kimi_k2 import KimiK2Parser
from stoker.server.protocols.common.parsers.tools.llama3 import Llama3Parser
from stoker.server.protocols.common.parsers.tools.llama4_pythonic import Llama4PythonicParser
from stoker.server.protocols.common.parsers.tools.minimax_m1 import MiniMaxM1Parser
from stoker.server.protocols.common.parsers.tools.minimax_m2 import MiniMaxM2Parser
from stoker.server.protocols.common.parsers.tools.mistral import MistralParser
from stoker.server.protocols.common.parsers.tools.parser import ToolParser
from stoker.server.protocols.common.parsers.tools.phi4_mini import Phi4MiniParser
from stoker.server.protocols.common.parsers.tools.qwen3_coder import Qwen3CoderParser
from stoker.server.protocols.common.parsers.tools.xlam import XlamParser

TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser")
TOOL_PARSERS.add("llama3", Llama3Parser)
TOOL_PARSERS.add("llama4_pythonic", Llama4PythonicParser)
TOOL_PARSERS.add("hermes", HermesParser)
TOOL_PARSERS.add("qwen", HermesParser)
TOOL_PARSERS.add("qwen3_coder", Qwen3CoderParser)
TOOL_PARSERS.add("mistral", MistralParser)
TOOL_PARSERS.add("deepseek_v3", DeepSeekV3Parser)
TOOL_PARSERS.add("deepseek_v31", DeepSeekV31Parser)
TOOL_PARSERS.add("gpt_oss", GptOssParser)
TOOL_PARSERS.add("glm45", Glm45Parser)
TOOL_PARSERS.add("kimi_k2", KimiK2Parser)
TOOL_PARSERS.add("granite", GraniteParser)
TOOL_PARSERS.add("minimax_m1", MiniMaxM1Parser)
TOOL_PARSERS.add("minimax_m2", MiniMaxM2Parser)
TOOL_PARSERS.add("internlm", InternLMParser)
TOOL_PARSERS.add("xlam", XlamParser)
TOOL_PARSERS.add("phi4_mini", Phi4MiniParser)
TOOL_PARSERS.add("jamba", JambaParser)
