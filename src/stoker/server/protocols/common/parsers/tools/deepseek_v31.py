"""The format of DeepSeek V3.1: NAME<｜tool▁sep｜>{…}, with the markers of V3."""

from __future__ import annotations

import re

from stoker.server.protocols.common.parsers.tools.deepseek_v3 import DeepSeekV3Parser


class DeepSeekV31Parser(DeepSeekV3Parser):
    template_marks = ("<｜tool▁sep｜>",)
    header = re.compile(r"\s*(?P<name>[^\s<{]+)<｜tool▁sep｜>\s*(?=\{)")
