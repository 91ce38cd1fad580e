"""The table of parsers that separate reasoning from the answer. `--reasoning-parser` uses these names."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocols.common.parsers.reasoning.gpt_oss import GptOssReasoning
from stoker.server.protocols.common.parsers.reasoning.granite import GraniteReasoning
from stoker.server.protocols.common.parsers.reasoning.kimi_k2 import KimiK2Reasoning
from stoker.server.protocols.common.parsers.reasoning.mistral import MistralReasoning
from stoker.server.protocols.common.parsers.reasoning.parser import ReasoningParser
from stoker.server.protocols.common.parsers.reasoning.think import DeepSeekR1Parser, ThinkParser

REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry("reasoning parser")
REASONING_PARSERS.add("qwen3", ThinkParser)
REASONING_PARSERS.add("deepseek_r1", DeepSeekR1Parser)
REASONING_PARSERS.add("deepseek_v31", ThinkParser)
REASONING_PARSERS.add("gpt_oss", GptOssReasoning)
REASONING_PARSERS.add("glm45", ThinkParser)
REASONING_PARSERS.add("kimi_k2", KimiK2Reasoning)
REASONING_PARSERS.add("granite", GraniteReasoning)
REASONING_PARSERS.add("minimax_m1", ThinkParser)
REASONING_PARSERS.add("minimax_m2", ThinkParser)
REASONING_PARSERS.add("mistral", MistralReasoning)
REASONING_PARSERS.add("intern_s1", ThinkParser)
